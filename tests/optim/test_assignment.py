"""Which matrix gets which constraint: assignments, maps, what they refuse, and the optimizer that they make."""

from __future__ import annotations

import copy
import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from geocont.errors import UserError
from geocont.manifolds import as_manifold
from geocont.models import GPT2Config
from geocont.modules import GPT2Module
from geocont.optim import AdamWOptions, ManifoldMuon, ModuleWise, MuonOptions, NamedParameters

NETWORK = GPT2Config(layers=2, heads=2, width=16, context=8, vocabulary=21)
EXPECTED = {
    "unconstrained": {"attention": "euclidean", "mlp": "euclidean"},
    "stiefel": {"attention": "stiefel", "mlp": "stiefel"},
    "dgram": {"attention": "dgram", "mlp": "dgram"},
    "hetero": {"attention": "stiefel", "mlp": "dgram"},
    "hetero_inv": {"attention": "dgram", "mlp": "stiefel"},
}


def module(**options: Any) -> GPT2Module:
    torch.manual_seed(0)
    return GPT2Module(**{"network": NETWORK, "optimizer": functools.partial(torch.optim.AdamW, lr=1e-2), **options})


def named(model: GPT2Module) -> NamedParameters:
    return NamedParameters(list(model.named_parameters()), model.weight_map())


def set_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(100 + seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


def contents(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Parameter name -> constraint, or ``adamw``, with several constraints where it is fused."""
    found = {}
    for group in optimizer.param_groups:
        blocks = group.get("blocks") or [group]
        specs = [block.get("manifold", "adamw") for block in blocks]
        for name in group["param_names"]:
            found[name] = " ".join(spec if isinstance(spec, str) else repr(as_manifold(spec)) for spec in specs)
    return found


def refused(assignment: Any, *parts: str, **options: Any) -> None:
    """Asserts that an assignment is refused in one line that has all ``parts``."""
    with pytest.raises(UserError) as caught:
        ModuleWise(named(module()), assignment, **options)
    for part in parts:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("fused", ["split", "whole"])
@pytest.mark.parametrize("assignment", [*EXPECTED, "adamw"])
def test_each_assignment_puts_every_parameter_where_it_belongs(assignment: str, fused: Any) -> None:
    """Protects the experiment: matrices on their constraint; embeddings, tied head, norms and biases are AdamW's."""
    model = module()
    optimizer = ModuleWise(named(model), assignment, fused)
    found = contents(optimizer)
    assert set(found) == {name for name, _ in model.named_parameters()}
    for name, kind in found.items():
        matrix = ".h." in name and name.endswith(".weight") and "ln_" not in name
        if not matrix or assignment == "adamw":
            assert kind == "adamw"
            continue
        wanted = EXPECTED[assignment]["attention" if ".attn." in name else "mlp"]
        assert kind == (" ".join([wanted] * 3) if "c_attn" in name and fused == "split" else wanted)
    assert "model.wte.weight" in found
    assert not any("lm_head" in name for name in found)  # tied: it is wte
    counted = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(counted) == len({id(p) for p in counted}) == len(list(model.parameters()))
    for name, p in model.named_parameters():
        for group in optimizer.param_groups:
            if name in group["param_names"] and group["name"] == "adamw":
                assert group["weight_decay"] == (0.1 if p.ndim >= 2 else 0.0)
    for name, _, role, residual in getattr(optimizer.parts.get("muon"), "manifold_residuals", list)():
        assert residual <= 1e-5
        assert role == ("attention" if ".attn." in name else "mlp")


def test_an_untied_head_is_adamws() -> None:
    """Protects heads: a matrix that is no hidden one must not be orthogonalised."""
    network = GPT2Config(layers=1, heads=2, width=16, context=8, vocabulary=21, tied=False)
    assert contents(ModuleWise(named(module(network=network)), "stiefel"))["model.lm_head.weight"] == "adamw"


def test_maps_go_by_module_projection_and_regular_expression() -> None:
    """Protects maps in YAML: each way to say which matrix, options of a manifold, and AdamW for some."""
    bounded = {"name": "dgram", "lo": 0.5, "hi": 2.0}
    kinds = contents(ModuleWise(named(module()), {"attention": "stiefel", "up": bounded, "down": "adamw"}))
    assert kinds["model.h.1.attn.c_attn.weight"] == "stiefel stiefel stiefel"
    assert kinds["model.h.0.mlp.c_fc.weight"] == "DGram(lo=0.5, hi=2)"
    assert kinds["model.h.0.mlp.c_proj.weight"] == "adamw"
    layers = {"q/layer_00": "stiefel", "q/layer_01": "oblique", "^[kvo]/": "dgram", r"h\.\d+\.mlp": "euclidean"}
    kinds = contents(ModuleWise(named(module()), layers))
    assert kinds["model.h.0.attn.c_attn.weight"] == "stiefel dgram dgram"
    assert kinds["model.h.1.attn.c_attn.weight"] == "oblique dgram dgram"
    assert kinds["model.h.1.attn.c_proj.weight"] == "dgram"
    assert kinds["model.h.1.mlp.c_fc.weight"] == "euclidean"
    model = module()
    optimizer = ModuleWise(named(model), {"attention": "stiefel", "mlp": bounded}, muon=MuonOptions(lr=0.3))
    for step in range(3):
        set_gradients(model, step)
        optimizer.step()
    norms = model.model.h[0].mlp.c_fc.weight.norm(dim=0)
    assert norms.min() >= 0.5 * (1 - 1e-5)
    assert norms.max() <= 2.0 * (1 + 1e-5)


@pytest.mark.parametrize(
    ("assignment", "parts"),
    [
        ("hetro", ("got 'hetro'", "did you mean hetero?", "unconstrained, stiefel")),
        ({"attention": "stiefel"}, ("nothing covers up/layer_00 (model.h.0.mlp.c_fc.weight)", "add up:")),
        ({}, ("nothing covers q/layer_00",)),
        ({"attention": "stiefel", "q": "dgram", "mlp": "dgram"}, ("q/layer_00", "by both 'attention' and 'q'")),
        ({"attention": "stifel", "mlp": "dgram"}, ("optimizer.assignment.attention", "did you mean stiefel?")),
        ({"attention": "stiefel", "mlp": "dgram", "gate": "dgram"}, ("'gate' covers no matrix", "attention, down")),
        ({"attention": "stiefel", "mlp": "dgram", "atention": "dgram"}, ("did you mean attention?",)),
        ({"attention": "stiefel", "mlp": {"name": "dgram", "low": 1}}, ("optimizer.assignment.mlp", "no options low")),
        (
            {"attention": "stiefel", "mlp": {"name": "dgram", "lo": 3, "hi": 2}},
            ("optimizer.assignment.mlp", "lo <= hi"),
        ),
        ({"attention": "stiefel", "(": "dgram"}, ("'(' is not a regular expression",)),
        ({"q": "adamw", "k": "stiefel", "v": "stiefel", "o": "dgram", "mlp": "dgram"}, ("c_attn.weight is fused",)),
        ({"attention": None, "mlp": "dgram"}, ("optimizer.assignment.attention", "got None")),
        ({"attention": ["stiefel"], "mlp": "dgram"}, ("optimizer.assignment.attention",)),
        (None, ("optimizer.assignment", "got None")),
        (["stiefel"], ("optimizer.assignment", "got ['stiefel']")),
    ],
)
def test_what_does_not_fit_is_named_in_one_line(assignment: Any, parts: tuple[str, ...]) -> None:
    """Protects the user of a map: double or no cover, idle keys, unknown names; each says which."""
    refused(assignment, *parts)


def test_fused_matrices_have_one_constraint_as_a_whole() -> None:
    """Protects `whole`: three constraints cannot hold on one matrix, and the remedy is named."""
    mixed = {"q": "stiefel", "k": "dgram", "v": "dgram", "o": "dgram", "mlp": "dgram"}
    refused(mixed, "model.h.0.attn.c_attn.weight", "optimizer.fused=split", fused="whole")
    refused("hetero", "optimizer.fused must be split or whole, got 'both'", fused="both")
    assert contents(ModuleWise(named(module()), mixed))["model.h.0.attn.c_attn.weight"] == "stiefel dgram dgram"


@pytest.mark.parametrize("fused", ["split", "whole"])
def test_it_steps_as_its_parts_would(fused: Any) -> None:
    """Protects the composite: Muon's matrices and AdamW's tensors go as if each optimizer were alone."""
    together, apart = module(), module()
    optimizer = ModuleWise(
        named(together), "hetero", fused, MuonOptions(lr=0.05, weight_decay=0.3), AdamWOptions(lr=1e-3)
    )
    weights = apart.weight_map()
    alone: list[torch.optim.Optimizer] = []
    hidden = set(weights.parameters)
    for name, p in apart.named_parameters():
        if name not in hidden:
            decay = 0.1 if p.ndim >= 2 else 0.0
            alone.append(torch.optim.AdamW([p], lr=1e-3, betas=(0.9, 0.95), weight_decay=decay))
            continue
        kind = "stiefel" if ".attn." in name else "dgram"
        blocks = None
        if "c_attn" in name and fused == "split":
            blocks = [{"manifold": kind, "rows": (16 * i, 16 * i + 16)} for i in range(3)]
        alone.append(ManifoldMuon([p], lr=0.05, momentum=0.95, manifold=kind, blocks=blocks))
    for step in range(3):
        set_gradients(together, step)
        set_gradients(apart, step)
        optimizer.step()
        for each in alone:
            each.step()
    for (name, p), q in zip(together.named_parameters(), apart.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=2e-5, rtol=0.0, msg=name)


@pytest.mark.parametrize("how", ["file", "deepcopy"])
def test_a_restored_run_continues_bit_for_bit(how: str, tmp_path: Path) -> None:
    """Protects resuming: state, multipliers and rates of both parts come back, through weights_only."""
    model = module()
    optimizer = ModuleWise(named(model))
    for step in range(3):
        set_gradients(model, step)
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.2
    if how == "file":
        other = module()
        restored = ModuleWise(named(other))
        other.load_state_dict(model.state_dict())
        torch.save(optimizer.state_dict(), tmp_path / "state.pt")
        restored.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    else:
        other, restored = copy.deepcopy((model, optimizer))
    assert restored.parts["muon"].param_groups[0]["lr"] == 0.2
    assert restored.describe() == optimizer.describe()
    for m, o in ((model, optimizer), (other, restored)):
        for step in range(3, 5):
            set_gradients(m, step)
            o.step()
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name


@pytest.mark.parametrize(
    "other",
    [
        {"assignment": "hetero_inv"},
        {"assignment": "stiefel"},
        {"assignment": "unconstrained"},
        {"assignment": "adamw"},
        {"fused": "whole"},
        {"assignment": {"attention": "stiefel", "mlp": {"name": "dgram", "lo": 0.5}}},
    ],
    ids=str,
)
def test_another_assignment_does_not_take_the_state(other: dict[str, Any]) -> None:
    """Protects resumed runs: torch would silently go on under the checkpoint's constraints, not the configuration's."""
    model = module()
    optimizer = ModuleWise(named(model), "hetero")
    set_gradients(model, 0)
    optimizer.step()
    restored = ModuleWise(named(module()), **other)
    with pytest.raises(UserError) as caught:
        restored.load_state_dict(optimizer.state_dict())
    assert "checkpoint was saved under" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("where", ["model.wte.weight", "model.h.0.mlp.c_fc.weight", "model.h.1.ln_1.bias"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_gradient_anywhere_skips_both_parts(where: str, bad: float) -> None:
    """Protects AdamW's tensors too: nothing moves, no state changes, and the step is counted once."""
    model = module()
    optimizer = ModuleWise(named(model))
    for step in range(2):
        set_gradients(model, step)
        optimizer.step()
    dict(model.named_parameters())[where].grad.view(-1)[3] = bad  # type: ignore[union-attr]
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.step()
    assert all(torch.equal(p, weights[name]) for name, p in model.state_dict().items())
    after = optimizer.state_dict()["state"]
    assert after.keys() == state.keys()
    assert all(torch.equal(after[i][key], state[i][key]) for i in state for key in state[i])
    assert optimizer.parts["muon"].skipped_steps == 1


def test_the_table_tells_every_rule() -> None:
    """Protects what is printed at the start of a run: each constraint, the count of matrices, and all parameters."""
    model = module()
    lines = ModuleWise(named(model), "hetero").describe().splitlines()
    assert "attention: Stiefel()" in lines[1]
    assert any("mlp: DGram(lo=0, hi=inf)" in line and line.split()[-2] == "4" for line in lines)
    assert any("adamw" in line and "weight decay 0.1" in line for line in lines)
    assert any("adamw" in line and "weight decay 0 " in line for line in lines)
    total = sum(int(line.split()[-1].replace(",", "")) for line in lines[1:])
    assert total == sum(p.numel() for p in model.parameters())
    attention = [int(line.split()[-2]) for line in lines if "attention" in line]
    assert sum(attention) == 8  # q, k, v and o of two layers
    bounded = {"attention": "oblique", "mlp": {"name": "dgram", "lo": 0.5}}
    table = ModuleWise(named(model), bounded, "whole").describe()
    assert "attention: Oblique()" in table
    assert "mlp: DGram(lo=0.5, hi=inf)" in table


class Stranger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 12)
        self.blocks = nn.ModuleList(nn.ModuleDict({"fc": nn.Linear(12, 24), "out": nn.Linear(24, 12)}) for _ in "ab")


def stranger() -> Stranger:
    torch.manual_seed(0)
    return Stranger()


def test_a_strangers_module_is_mapped_by_patterns() -> None:
    """Protects networks without a weight map: patterns of plain names do, and without them the remedy is named."""
    model = stranger()
    weights = {"up": r"blocks\.(\d+)\.fc\.weight", "down": {"pattern": r"blocks\.(\d+)\.out\.weight", "module": "mlp"}}
    kinds = contents(ModuleWise(model.named_parameters(), {"up": "stiefel", "down": "dgram"}, weights=weights))
    assert kinds["blocks.1.fc.weight"] == "stiefel"
    assert kinds["blocks.0.out.weight"] == "dgram"
    assert kinds["embed.weight"] == kinds["blocks.0.fc.bias"] == "adamw"
    with pytest.raises(UserError, match="optimizer.weights: the model has no weight map; give the patterns"):
        ModuleWise(model.named_parameters(), "stiefel")
    with pytest.raises(UserError, match="weights.up: no parameter matches"):
        ModuleWise(model.named_parameters(), "stiefel", weights={"up": r"layers\.(\d+)\.fc\.weight"})


@pytest.mark.parametrize("manifold", ["dgram", "oblique", "euclidean"])
def test_transposed_storage_does_not_change_the_step(manifold: str) -> None:
    """Protects Conv1D's in x out: columns of a square matrix, and rows of the step's scaling, are of out x in."""
    square = nn.ParameterDict({"a": torch.randn(24, 24), "b": torch.randn(24, 48)})
    turned = nn.ParameterDict({name: p.detach().T.clone() for name, p in square.items()})
    options = MuonOptions(lr=0.1, adjust_lr_fn="original")
    patterns: list[dict[str, Any]] = [
        {"hidden": {"pattern": "a", "transposed": t}, "up": {"pattern": "b", "transposed": t}} for t in (False, True)
    ]
    for model, weights in zip((square, turned), patterns, strict=True):
        optimizer = ModuleWise(model.named_parameters(), {"mlp": manifold}, muon=options, weights=weights)
        for step in range(2):
            for name, p in model.items():
                g = torch.randn(square[name].shape, generator=torch.Generator().manual_seed(step))
                p.grad = (g if model is square else g.T).clone()
            optimizer.step()
    for name, p in square.items():
        torch.testing.assert_close(p, turned[name].T, atol=1e-4, rtol=0.0)


def test_a_parameter_that_is_mapped_in_part_is_not_taken_as_a_whole() -> None:
    """Protects what no projection names: rows beside q must not be orthogonalised with q."""
    model = nn.ParameterDict({"qkv": torch.randn(36, 12)})
    for weights in (
        {"q": {"pattern": "qkv", "rows": [0, 12]}},
        {"q": {"pattern": "qkv", "rows": [0, 12]}, "k": {"pattern": "qkv", "rows": [12, 24]}},
    ):
        with pytest.raises(UserError, match="no projection covers the whole of qkv; set optimizer.fused=whole"):
            ModuleWise(model.named_parameters(), "stiefel", weights=weights)
        assert contents(ModuleWise(model.named_parameters(), "stiefel", "whole", weights=weights)) == {"qkv": "stiefel"}


@pytest.mark.filterwarnings("ignore:::lightning", "ignore:.*treespec:FutureWarning")
def test_compiled_networks_have_the_same_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects `compile: true`, whose names torch changes in some ways: a fit assigns and trains the same matrices."""
    compiler = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self: compiler(self, backend="eager"))
    tokens = torch.randint(21, (8, 8), generator=torch.Generator().manual_seed(0))
    found, weights = [], []
    for compile in (False, True):
        model = module(optimizer=ModuleWise, compile=compile)
        quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
        trainer = Trainer(
            max_steps=2, accelerator="cpu", enable_checkpointing=False, default_root_dir=tmp_path, **quiet
        )
        trainer.fit(model, DataLoader(TensorDataset(tokens, tokens.roll(-1, 1)), batch_size=4))
        optimizer = trainer.optimizers[0]
        assert trainer.global_step == 2
        found.append(contents(optimizer))
        weights.append([p.detach().clone() for p in model.parameters()])
        assert all(residual <= 1e-5 for *_, residual in optimizer.parts["muon"].manifold_residuals())
    assert found[0] == found[1]
    assert found[0]["model.h.0.mlp.c_fc.weight"] == "dgram"
    for a, b in zip(*weights, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


def test_options_reach_the_parts() -> None:
    """Protects configurations: each option of Muon and AdamW ends in its groups, and defaults are the paper's."""
    optimizer = ModuleWise(named(module()))
    muon, adamw = (optimizer.parts[name].param_groups[0] for name in ("muon", "adamw"))
    assert (muon["lr"], muon["momentum"], muon["nesterov"], muon["weight_decay"]) == (0.02, 0.95, True, 0.1)
    assert (adamw["lr"], adamw["betas"], adamw["eps"], adamw["weight_decay"]) == (6e-4, (0.9, 0.95), 1e-8, 0.1)
    options = MuonOptions(0.3, 0.5, False, 0.2, "projected", 7, "match_rms_adamw", shard=False)
    optimizer = ModuleWise(named(module()), "stiefel", "split", options, AdamWOptions(0.1, (0.5, 0.6), 1e-3, 0.4))
    for group in optimizer.param_groups:
        if group["name"] == "muon":
            assert {key: group[key] for key in vars(options) if key != "shard"} | {"shard": False} == vars(options)
        else:
            assert (group["lr"], group["betas"], group["eps"]) == (0.1, (0.5, 0.6), 1e-3)
    assert optimizer.parts["muon"].shard is False
    with pytest.raises(UserError, match="optimizer.solver must be one of"):
        ModuleWise(named(module()), muon=MuonOptions(solver="newton"))  # type: ignore[arg-type]


def test_the_schedule_scales_both_parts(tmp_path: Path) -> None:
    """Protects the ratio of Muon's to AdamW's rate through warm-up, and the decay that biases do not have."""
    model = module()
    optimizer = ModuleWise(named(model))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    for step in range(6):
        for group in optimizer.param_groups:
            peak = 0.02 if group["name"] == "muon" else 6e-4
            assert group["lr"] == pytest.approx(peak * min(1.0, (step + 1) / 4))
        assert optimizer.parts["adamw"].param_groups[-1]["weight_decay"] == 0.0
        set_gradients(model, step)
        before: list[Tensor] = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        moved = [float((p.detach() - old).abs().max()) for p, old in zip(model.parameters(), before, strict=True)]
        assert min(moved) > 0
        scheduler.step()
