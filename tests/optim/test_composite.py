"""One optimizer of several rules, and schedules that scale them together."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn

from geocont.errors import UserError
from geocont.optim import Composite, NamedParameters, Rule, Schedule
from geocont.weights import WeightMap

SGD = partial(torch.optim.SGD, lr=0.1)
ADAMW = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
MUON = partial(torch.optim.Muon, lr=0.02)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"embed": nn.Linear(6, 8), "hidden": nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])})


def named(module: nn.Module) -> NamedParameters:
    shapes = {name: p.shape for name, p in module.named_parameters()}
    return NamedParameters(
        module.named_parameters(), WeightMap.from_patterns({"hidden": r"hidden\.(\d+)\.weight"}, shapes)
    )


def set_gradients(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_each_rule_steps_its_own_parameters_as_if_it_were_alone() -> None:
    together, apart = network(), network()
    rules = {"muon": Rule(MUON, "matrices"), "biases": Rule(SGD, r"bias$"), "adamw": Rule(ADAMW)}
    optimizer = Composite(named(together), rules)
    parts = [
        MUON([p for n, p in apart.named_parameters() if n.startswith("hidden") and n.endswith("weight")]),
        SGD([p for n, p in apart.named_parameters() if n.endswith("bias")]),
        ADAMW([apart["embed"].weight]),
    ]
    for step in range(3):
        set_gradients(together, step)
        set_gradients(apart, step)
        optimizer.step()
        for part in parts:
            part.step()
    for (name, a), b in zip(together.named_parameters(), apart.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert [group["name"] for group in optimizer.param_groups] == ["muon", "biases", "adamw"]


def test_schedule_scales_every_group_and_reaches_the_parts() -> None:
    """A scheduler that writes one rate into all groups loses the ratio of Muon's to AdamW's."""
    module = network()
    optimizer = Composite(named(module), {"muon": Rule(MUON, "matrices"), "adamw": Rule(ADAMW)})
    scheduler = Schedule("cosine", warmup_steps=4, floor=0.1).build(optimizer, 20)
    peaks = [group["initial_lr"] for group in optimizer.param_groups]
    for step in range(20):
        factor = Schedule("cosine", warmup_steps=4, floor=0.1).factor(step, 20)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([factor * peak for peak in peaks])
        assert optimizer.parts["muon"].param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        set_gradients(module, step)
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.002)


def test_state_round_trips_exactly(tmp_path: object) -> None:
    def build() -> tuple[nn.Module, Composite]:
        module = network()
        return module, Composite(named(module), {"muon": Rule(MUON, "matrices"), "adamw": Rule(ADAMW)})

    (module, optimizer), (other, restored) = build(), build()
    for step in range(2):
        set_gradients(module, step)
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.5
    state = copy.deepcopy(optimizer.state_dict())
    torch.save(state, f"{tmp_path}/state.pt")
    other.load_state_dict(module.state_dict())
    restored.load_state_dict(torch.load(f"{tmp_path}/state.pt", weights_only=True))
    for step in range(2, 4):
        for m, o in ((module, optimizer), (other, restored)):
            set_gradients(m, step)
            o.step()
    for (name, a), b in zip(module.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
    swapped = Composite(named(other), {"adamw": Rule(ADAMW), "muon": Rule(MUON, "matrices")})
    with pytest.raises(UserError, match="saved under the rules"):
        swapped.load_state_dict(state)


def test_closure_runs_once() -> None:
    module, calls = network(), []
    optimizer = Composite(named(module), {"muon": Rule(MUON, "matrices"), "adamw": Rule(ADAMW)})

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        set_gradients(module, 0)
        return 1.5

    assert optimizer.step(closure) == 1.5
    assert calls == [True]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({}, "at least one rule"),
        ({"a": Rule(SGD, "matrices")}, "no rule covers embed.weight; add one with `parameters: rest`"),
        ({"a": Rule(SGD, "weight"), "b": Rule(SGD, "hidden"), "c": Rule(SGD)}, "hidden.0.weight is covered by a and b"),
        ({"a": Rule(SGD, "nothing"), "b": Rule(SGD)}, "optimizer.rules.a.parameters: 'nothing' takes no parameter"),
        ({"a": Rule(SGD, "(("), "b": Rule(SGD)}, "is not a regular expression"),
        ({"a": Rule(SGD), "b": Rule(SGD)}, "a and b both take the rest"),
    ],
)
def test_rules_that_do_not_fit_are_named(rules: dict[str, Rule], message: str) -> None:
    with pytest.raises(UserError) as caught:
        Composite(named(network()), rules)
    assert message in str(caught.value)


def test_matrices_need_a_map() -> None:
    with pytest.raises(UserError, match="the model has no weight map"):
        Composite(list(network().named_parameters()), {"a": Rule(SGD, "matrices"), "b": Rule(SGD)})


def test_shapes_of_the_schedule() -> None:
    assert [Schedule().factor(step, 10) for step in (0, 5, 99)] == [1, 1, 1]
    linear = Schedule("linear", warmup_steps=2, floor=0.2)
    assert [linear.factor(step, 12) for step in (0, 1, 2, 7, 12, 99)] == pytest.approx([0.5, 1, 1, 0.6, 0.2, 0.2])
    cosine = Schedule("cosine")
    assert [cosine.factor(step, 8) for step in (0, 4, 8)] == pytest.approx([1, 0.5, 0])


def test_schedules_that_make_no_sense_are_named() -> None:
    with pytest.raises(UserError, match=r"schedule.floor must be in \[0, 1\], got 2"):
        Schedule(floor=2)
    with pytest.raises(UserError, match=r"schedule.warmup_steps must not be negative, got -1"):
        Schedule(warmup_steps=-1)
    with pytest.raises(UserError, match=r"schedule.total_steps must exceed warmup_steps \(5\), got 5"):
        Schedule(warmup_steps=5, total_steps=5)
    with pytest.raises(UserError, match="schedule.shape cosine needs an end"):
        Schedule("cosine").build(SGD(network().parameters()), math.inf)
