"""StabilityGuard: names what runs away, keeps a state from before, and leaves healthy runs alone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from callbacks import GradientCoherence, SoftmaxSaturation, SpectralDynamics, StabilityGuard
from geocont.errors import UserError
from geocont.runs.store import RunStore
from tests.callbacks.stranger import PATTERNS, Stranger
from tests.callbacks.stranger import train as train_stranger
from tests.callbacks.test_softmax_saturation import HEADS, WIDTH, Attention, Reader, train
from tests.conftest import same, weights_of


class Runaway(pl.Callback):
    """Scales q and k of one head by hand, before the forward pass of a step."""

    def __init__(self, step: int = 5, layer: int = 1, head: int = 2, factor: float = 30.0) -> None:
        self.step, self.layer, self.head, self.factor = step, layer, head, factor

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, *_: object) -> None:
        if trainer.global_step == self.step:
            size = WIDTH // HEADS
            for start in (0, WIDTH):
                module.layers[self.layer].qkv.weight.data[start + self.head * size :][:size] *= self.factor


class Calm(Reader):
    """Starts from small weights, as models do that stay healthy."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        for parameter in self.parameters():
            parameter.data.mul_(0.3)


class Poisoned(Calm):
    """Its loss is NaN at one step."""

    bad_step = 3

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * math.nan if self.trainer.global_step == self.bad_step else loss


def guard(**options: Any) -> StabilityGuard:
    return StabilityGuard(**{"every_n_steps": 1, "checkpoint_every_n_steps": None, **options})


@pytest.mark.parametrize("beside", ["alone", "first", "last"])
def test_a_head_that_runs_away_is_named_at_its_step(tmp_path: Path, beside: str) -> None:
    """Whether it measures itself or reads what others measure, before it or after it in the list."""
    watching = guard(saturated=None)
    callbacks: list[pl.Callback] = {
        "first": [watching, SoftmaxSaturation(1)],
        "last": [SoftmaxSaturation(1), watching],
    }.get(beside, [watching])
    store = RunStore(tmp_path)
    with pytest.warns(UserWarning, match=r"step 5: max_logit is .* \(bound 100\) in layer 1, head 2") as caught:
        trainer, _ = train(Calm(Attention(), Attention()), [*callbacks, Runaway()], steps=9, logger=store)
    assert sum("StabilityGuard: " in str(warning.message) for warning in caught) == 1  # not at every firing
    (event,) = watching.events
    assert (event["step"], event["cause"], event["layer"], event["head"]) == (5, "max_logit", 1, 2)
    assert event["value"] > event["bound"] == 100
    lines = (tmp_path / "guard.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [event]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["guard/events"] for row in rows if "guard/events" in row] == [0] * 5 + [1] * 4
    assert [row["guard/first_step"] for row in rows if "guard/first_step" in row] == [5] * 4
    assert trainer.global_step == 9
    assert float(trainer.callback_metrics["guard/events"]) == 1


def test_a_healthy_run_gets_no_alarm(recwarn: pytest.WarningsRecorder) -> None:
    watching = guard(sigma_max=1e3, weights={"qkv": r"layers\.(\d+)\.qkv\.weight"})
    _, rows = train(Calm(Attention(), Attention()), [watching], steps=20)
    assert watching.events == []
    assert not any("StabilityGuard" in str(warning.message) for warning in recwarn)
    assert set(rows.measured("guard/events").values()) == {0}
    assert not rows.measured("guard/first_step")
    plain = guard()
    train_stranger(Stranger(), [plain], steps=3)  # without attention: nothing is said of that either
    assert plain.events == []
    assert not any("scaled_dot_product" in str(warning.message) for warning in recwarn)


def test_training_is_bit_identical_with_and_without_the_guard(tmp_path: Path) -> None:
    plain, watched = Calm(Attention(0.1), Attention()), Calm(Attention(0.1), Attention())
    for module, callbacks in ((plain, []), (watched, [guard(action="skip", checkpoint_every_n_steps=2)])):
        torch.manual_seed(3)
        train(module, callbacks, steps=6, default_root_dir=tmp_path)
    assert same(plain.state_dict(), watched.state_dict())


def test_heads_that_follow_are_new_events_and_those_of_one_step_are_one() -> None:
    watching = guard()
    both = [Runaway(step=2, layer=1, head=1), Runaway(step=2, layer=0, head=2), Runaway(step=4, layer=0, head=0)]
    with pytest.warns(UserWarning, match="layer 0, head 2, and 1 more"):
        train(Calm(Attention(), Attention()), [watching, *both], steps=6)
    seen = [(e["step"], e["layer"], e["head"], e["others"]) for e in watching.events if e["cause"] == "max_logit"]
    assert seen == [(2, 0, 2, ["max_logit/None/1/1"]), (4, 0, 0, [])]


def test_saturation_and_singular_values_have_bounds() -> None:
    watching = guard(max_logit=None, saturated=0.5)
    with pytest.warns(UserWarning, match=r"step 5: saturated is .* \(bound 0.5\) in layer 1, head 2"):
        train(Calm(Attention(), Attention()), [watching, Runaway()], steps=7)
    for extra in ([], [SpectralDynamics(1, weights=PATTERNS)]):
        module, watching = Stranger(), guard(sigma_max=3.0, weights=PATTERNS)
        module.blocks[3].weight.data *= 9
        with pytest.warns(UserWarning, match=r"step 0: sigma_max is .* \(bound 3\) in layer 3, hidden"):
            train_stranger(module, [watching, *extra], steps=2)
        assert len(watching.events) == 1


def test_stop_ends_the_training_at_the_step() -> None:
    with pytest.warns(UserWarning, match="layer 1, head 2"):
        trainer, _ = train(Calm(Attention(), Attention()), [guard(action="stop"), Runaway()], steps=20)
    assert trainer.global_step == 6
    module, watching = Poisoned(Attention()), guard(action="stop")
    with pytest.warns(UserWarning, match="step 3: the loss is nan"):
        trainer, _ = train(module, [watching], steps=20)
    assert trainer.global_step == 4
    assert all(bool(p.isfinite().all()) for p in module.parameters())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_skip_leaves_out_the_update_and_training_goes_on(accumulate: int) -> None:
    """One NaN makes all weights NaN, and the sums of gradients for ever."""
    module, watching = Poisoned(Attention()), guard(action="skip")
    sums = GradientCoherence(1, weights={"qkv": r"layers\.(\d+)\.qkv\.weight"})
    states: dict[int, dict[str, Tensor]] = {}

    class Spy(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
            states[trainer.global_step] = {name: p.detach().clone() for name, p in module.named_parameters()}

    with pytest.warns(UserWarning, match="step 3: the loss is nan"):
        trainer, rows = train(module, [sums, watching, Spy()], steps=6, accumulate_grad_batches=accumulate)
    assert trainer.global_step == 6
    assert same(states[3], states[4])
    assert not same(states[4], states[5])
    assert all(bool(value.isfinite().all()) for value in (*states[6].values(), *sums._cumulative.values()))
    assert rows.measured("guard/skipped_steps")[5] == 1
    assert [event["cause"] for event in watching.events] == ["loss"]


def test_skip_sees_gradients_that_are_not_finite() -> None:
    class Bad(Calm):
        def on_after_backward(self) -> None:
            if self.trainer.global_step == 2:
                self.head.weight.grad[0, 0] = math.inf

    module, watching = Bad(Attention()), guard(action="skip")
    with pytest.warns(UserWarning, match="step 2: a gradient is not finite in head.weight"):
        train(module, [watching], steps=4)
    assert all(bool(p.isfinite().all()) for p in module.parameters())
    assert watching.skipped_steps == 1


@pytest.mark.parametrize(("every", "kept"), [(1, 4), (3, 3), (100, 0)])
def test_the_healthy_checkpoint_is_from_before_and_can_be_resumed(tmp_path: Path, every: int, kept: int) -> None:
    """A state that was saved just before the alarm may be the very one that is spoilt."""
    whole = Calm(Attention(), Attention())
    train(whole, [], steps=9, batch_size=64)
    watching = guard(checkpoint_every_n_steps=every)
    with pytest.warns(UserWarning, match="layer 1, head 2"):
        train(Calm(Attention(), Attention()), [watching, Runaway()], steps=9, batch_size=64, default_root_dir=tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["healthy.ckpt"]
    path = tmp_path / "checkpoints/healthy.ckpt"
    saved = torch.load(path, weights_only=True)
    assert saved["global_step"] == kept
    again, resumed = Calm(Attention(), Attention()), guard(checkpoint_every_n_steps=every)
    train(again, [resumed], steps=9, batch_size=64, ckpt_path=path, default_root_dir=tmp_path)
    assert resumed.events == []
    assert same(whole.state_dict(), again.state_dict())  # without the hand that scaled


def test_events_survive_a_resumption(tmp_path: Path) -> None:
    watching = guard()
    with pytest.warns(UserWarning, match="layer 1, head 2"):
        trainer, _ = train(Calm(Attention(), Attention()), [watching, Runaway()], steps=7)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    again = guard()
    _, rows = train(Calm(Attention(), Attention()), [again], steps=9, ckpt_path=tmp_path / "a.ckpt")
    assert again.events == watching.events  # and nothing is reported twice
    assert set(rows.measured("guard/first_step").values()) == {5}


def test_options_are_checked() -> None:
    for options, message in (
        ({"action": "panic"}, "action must be warn, stop or skip, got 'panic'"),
        ({"max_logit": -1.0}, "max_logit must be above 0"),
        ({"checkpoint_every_n_steps": 0}, "checkpoint_every_n_steps must be at least 1"),
    ):
        with pytest.raises(UserError, match=message):
            StabilityGuard(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("every", "kept"), [(1000, 0), (2, 4)])
def test_a_run_of_the_command_goes_on_from_its_healthy_state(
    fit: Callable[..., Path], geocont: Callable[..., tuple[int, str, str]], every: int, kept: int
) -> None:
    """Saved before the first step or after a later one, no sample is seen twice or left out."""
    steps = ("--trainer.max_epochs=-1", "--trainer.max_steps=6")
    guarded = (
        f"--callbacks.stability_guard.checkpoint_every_n_steps={every}",
        "--callbacks.step_monitor.every_n_steps=1",
    )
    whole = fit("whole", *steps)
    part = fit("part", *steps, *guarded)
    healthy = part / "checkpoints/healthy.ckpt"
    assert torch.load(healthy, weights_only=True)["global_step"] == kept
    (part / "checkpoints/last.ckpt").write_bytes(healthy.read_bytes())
    status, out, err = geocont("fit", "--resume=part", *steps)
    assert status == 0, out + err
    assert same(weights_of(whole), weights_of(part))
