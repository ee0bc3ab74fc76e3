"""Manifold Muon as an optimizer: what a step changes, what it must not, and what survives a checkpoint."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from geocont.errors import UserError
from geocont.manifolds import DGram, Oblique, Stiefel, as_manifold
from geocont.optim import Block, ManifoldMuon

NAMES = ["stiefel", "dgram", "oblique", "euclidean"]
SHAPES = [(48, 16), (16, 48), (24, 24)]


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parameter(*shape: int, seed: int = 0) -> Parameter:
    return Parameter(gaussian(*shape, seed=500 + seed) / shape[0] ** 0.5)


def run(optimizer: torch.optim.Optimizer, steps: int = 1, seed: int = 0) -> None:
    for step in range(steps):
        for group in optimizer.param_groups:
            for i, p in enumerate(group["params"]):
                p.grad = gaussian(*p.shape, seed=1000 * seed + 10 * step + i).to(p.dtype)
        optimizer.step()


@pytest.mark.parametrize("solver", ["reweighted", "projected", "dual_ascent"])
@pytest.mark.parametrize("manifold", NAMES)
def test_a_learning_rate_of_zero_changes_nothing(manifold: str, solver: Any) -> None:
    """Protects the start and the end of a schedule, where lr is 0, from a drift by the way back to the manifold."""
    matrices = [parameter(*shape) for shape in SHAPES]
    optimizer = ManifoldMuon(matrices, lr=0.0, manifold=manifold, weight_decay=0.1, solver=solver)
    before = [p.detach().clone() for p in matrices]
    run(optimizer, 3)
    for p, old in zip(matrices, before, strict=True):
        torch.testing.assert_close(p.detach(), old, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("solver", ["reweighted", "projected", "dual_ascent"])
@pytest.mark.parametrize("manifold", ["stiefel", "dgram", "oblique"])
def test_matrices_start_on_their_manifold_and_stay_there(manifold: str, solver: Any) -> None:
    """Protects the constraint, whatever the solver: after every step, in every orientation."""
    matrices = [parameter(*shape) for shape in SHAPES]
    optimizer = ManifoldMuon(matrices, lr=0.1, manifold=manifold, solver=solver)
    for step in range(5):
        for p in matrices:
            assert as_manifold(manifold).check_point_on_manifold(p.detach(), atol=1e-5) == (True, None)
        run(optimizer, 1, seed=step)
    assert max(residual for *_, residual in optimizer.manifold_residuals()) <= 1e-5


@pytest.mark.parametrize("manifold", ["stiefel", "dgram"])
def test_a_thousand_steps_do_not_drift(manifold: str) -> None:
    """Protects long runs in float32: the residual does not add up, columns keep their places, norms stay sane."""
    torch.manual_seed(0)
    p = parameter(20, 6)
    optimizer = ManifoldMuon([("w", p)], lr=0.02, manifold=manifold, iterations=1)
    norms = p.detach().norm(dim=0)
    for _ in range(1000):
        p.grad = torch.randn(20, 6)
        before = p.detach().clone()
        optimizer.step()
        assert (torch.nn.functional.cosine_similarity(p.detach(), before, dim=0) > 0.9).all()
    gram = p.detach().double().T @ p.detach().double()
    if manifold == "stiefel":
        assert (gram - torch.eye(6)).abs().max() <= 1e-5
    else:
        d = gram.diagonal().sqrt()
        assert (gram / d / d[:, None] - torch.eye(6)).abs().max() <= 1e-5
        assert (p.detach().norm(dim=0) - norms).abs().max() <= 1000 * 0.02
    assert optimizer.skipped_steps == 0


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("manifold", NAMES)
def test_gradients_are_left_as_they_are(manifold: str, nesterov: bool) -> None:
    """Protects statistics read after the step: the published Muon writes into p.grad."""
    matrices = [parameter(*shape) for shape in SHAPES]
    optimizer = ManifoldMuon(matrices, manifold=manifold, nesterov=nesterov, weight_decay=0.5)
    for step in range(2):
        for i, p in enumerate(matrices):
            p.grad = gaussian(*p.shape, seed=10 * step + i)
        kept = [p.grad.clone() for p in matrices if p.grad is not None]
        optimizer.step()
        assert all(torch.equal(p.grad, old) for p, old in zip(matrices, kept, strict=True) if p.grad is not None)
        for p in matrices:  # nor is the gradient the momentum
            assert optimizer.state[p]["momentum_buffer"].data_ptr() != p.grad.data_ptr()  # type: ignore[union-attr]


def test_the_momentum_is_that_of_muon() -> None:
    """Protects b <- momentum b + g and g + momentum b: against a hand-made sequence, with an exact msign."""

    def msign(x: Tensor) -> Tensor:
        u, _, vh = torch.linalg.svd(x.double(), full_matrices=False)
        return (u @ vh).float()

    for nesterov in (True, False):
        p = parameter(48, 16)
        expected, buffer = p.detach().clone(), torch.zeros(48, 16)
        optimizer = ManifoldMuon([p], lr=0.1, momentum=0.8, nesterov=nesterov, manifold="euclidean")
        for step in range(3):
            p.grad = gaussian(48, 16, seed=step)
            buffer = 0.8 * buffer + p.grad
            expected = expected - 0.1 * msign(p.grad + 0.8 * buffer if nesterov else buffer)
            optimizer.step()
            torch.testing.assert_close(p.detach(), expected, atol=1e-4, rtol=0.0)
            torch.testing.assert_close(optimizer.state[p]["momentum_buffer"], buffer)


def test_weight_decay_is_exact_and_unconstrained_only() -> None:
    """Protects from a decay that is computed but never applied: wd = 10 is visible, and a constraint ignores it."""
    for shape in SHAPES:
        for adjust in (None, "original", "match_rms_adamw"):
            p = parameter(*shape)
            old = p.detach().clone()
            p.grad = torch.zeros_like(p)
            options: Any = {"lr": 0.02, "weight_decay": 10.0, "adjust_lr_fn": adjust}
            ManifoldMuon([p], manifold="euclidean", **options).step()
            assert torch.equal(p.detach(), old * (1 - 0.02 * 10.0))
    for manifold in ("stiefel", "dgram", "oblique"):
        with_decay, without = parameter(48, 16), parameter(48, 16)
        run(ManifoldMuon([with_decay], weight_decay=10.0, manifold=manifold), 2)
        run(ManifoldMuon([without], weight_decay=0.0, manifold=manifold), 2)
        assert torch.equal(with_decay, without)


@pytest.mark.parametrize("adjust", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize(("rows", "columns"), [(64, 32), (32, 64), (64, 64)])
def test_the_length_of_a_step_depends_on_the_shape_as_told(rows: int, columns: int, adjust: Any) -> None:
    """Protects lr scaling: orientation counts, both rules are never applied together, and the step is orthogonal."""
    factor = {
        None: 1.0,
        "original": max(1, rows / columns) ** 0.5,
        "match_rms_adamw": 0.2 * max(rows, columns) ** 0.5,
    }[adjust]
    u, _, vh = torch.linalg.svd(gaussian(rows, columns), full_matrices=False)
    p = parameter(rows, columns)
    old = p.detach().clone()
    p.grad = (u * torch.linspace(0.2, 1, min(rows, columns))) @ vh
    optimizer = ManifoldMuon([p], lr=0.5, manifold="euclidean", adjust_lr_fn=adjust)
    optimizer.step()
    step = (old - p.detach()).double()
    values = torch.linalg.svdvals(step) / (0.5 * factor)
    assert (values - 1).abs().max() <= 1e-3
    expected = 0.5 * factor * math.sqrt(min(rows, columns) / (rows * columns))
    assert float(step.square().mean().sqrt()) == pytest.approx(expected, rel=1e-3)
    assert optimizer.statistics()[0].update_rms == pytest.approx(expected, rel=1e-3)
    if adjust == "match_rms_adamw":
        assert expected == pytest.approx(0.5 * 0.2, rel=1e-6)  # the same for all shapes


def test_groups_keep_their_own_rates_under_a_scheduler() -> None:
    """Protects the ratio of rates: groups of equal shape are not stepped as one, and a schedule scales each."""
    together, apart = [parameter(48, 16, seed=i) for i in range(3)], [parameter(48, 16, seed=i) for i in range(3)]
    options = [
        {"lr": 0.1, "weight_decay": 0.5, "manifold": "euclidean"},
        {"lr": 0.01, "weight_decay": 0.0, "manifold": "euclidean"},
        {"lr": 0.03, "manifold": "stiefel"},
    ]
    optimizer = ManifoldMuon([{"params": [p], **o} for p, o in zip(together, options, strict=True)])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    for step in range(3):
        for i, o in enumerate(options):
            assert optimizer.param_groups[i]["lr"] == pytest.approx(o["lr"] / (step + 1))
            assert optimizer.param_groups[i]["weight_decay"] == o.get("weight_decay", 0.0)
        run(optimizer, 1, seed=step)
        scheduler.step()
    for p, o in zip(apart, options, strict=True):
        alone = ManifoldMuon([p], **o)  # type: ignore[arg-type]
        for step in range(3):
            alone.param_groups[0]["lr"] = o["lr"] / (step + 1)  # type: ignore[operator]
            run(alone, 1, seed=step)
    for a, b in zip(together, apart, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0.0)


def mixed() -> tuple[list[Parameter], ManifoldMuon]:
    matrices = [parameter(48, 16), parameter(16, 48), parameter(24, 24), parameter(24, 24, seed=1), parameter(12, 8)]
    blocks = [Block("stiefel", (0, 8)), Block({"name": "dgram", "lo": 0.1}, (8, 24))]
    groups: list[dict[str, Any]] = [
        {"params": matrices[:1], "manifold": "stiefel"},
        {"params": matrices[1:2], "manifold": {"name": "dgram", "lo": 0.2, "hi": 3.0}},
        {"params": matrices[2:3], "manifold": "dgram"},
        {"params": matrices[3:4], "blocks": blocks},
        {"params": matrices[4:], "manifold": "euclidean", "weight_decay": 0.1},
    ]
    return matrices, ManifoldMuon(groups)


@pytest.mark.parametrize("how", ["file", "deepcopy of the state", "deepcopy of the optimizer"])
def test_a_restored_run_continues_bit_for_bit(how: str, tmp_path: Path) -> None:
    """Protects checkpoints: momenta, multipliers and options come back, through torch.load(weights_only=True)."""
    matrices, optimizer = mixed()
    run(optimizer, 3)
    optimizer.param_groups[0]["lr"] = 0.123
    optimizer.skip()
    if how == "deepcopy of the optimizer":
        others, restored = copy.deepcopy((matrices, optimizer))
        assert restored.statistics() is not None
    else:
        others, restored = mixed()
        with torch.no_grad():
            for p, q in zip(matrices, others, strict=True):
                q.copy_(p)
        state = copy.deepcopy(optimizer.state_dict())
        if how == "file":
            torch.save(state, tmp_path / "state.pt")
            state = torch.load(tmp_path / "state.pt", weights_only=True)
        restored.load_state_dict(state)
    assert restored.param_groups[0]["lr"] == 0.123
    assert restored.skipped_steps == 1
    for each in (optimizer, restored):
        run(each, 2, seed=7)
    for p, q in zip(matrices, others, strict=True):
        assert torch.equal(p, q)
    fresh, unrestored = mixed()
    with torch.no_grad():
        for p, q in zip(matrices, fresh, strict=True):
            q.copy_(p)
    run(unrestored, 1, seed=8)
    run(optimizer, 1, seed=8)
    assert not torch.equal(matrices[0], fresh[0])  # the state matters


def test_bfloat16_matrices_survive_a_checkpoint(tmp_path: Path) -> None:
    """Protects bf16-true: a restored momentum of another type than the gradient fails in the third step."""

    def build() -> tuple[Parameter, ManifoldMuon]:
        p = Parameter(gaussian(24, 12).bfloat16())
        return p, ManifoldMuon([p], manifold="euclidean", weight_decay=0.1)

    (p, optimizer), (q, restored) = build(), build()
    run(optimizer, 2)
    assert p.dtype == torch.bfloat16
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    restored.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    q.data.copy_(p.data)
    for each in (optimizer, restored):
        run(each, 1, seed=3)
    assert torch.equal(p, q)
    assert p.isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_gradient_changes_nothing_at_all(bad: float) -> None:
    """Protects weights and momenta from one bad batch: the step is skipped as a whole and counted once."""
    matrices, optimizer = mixed()
    run(optimizer, 2)
    for i, p in enumerate(matrices):
        p.grad = gaussian(*p.shape, seed=i)
    matrices[2].grad[3, 4] = bad  # type: ignore[index]
    weights, state = copy.deepcopy([p.detach() for p in matrices]), copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert all(torch.equal(p, old) for p, old in zip(matrices, weights, strict=True))
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(after[i][key], state[i][key]) for i in state for key in state[i])
    run(optimizer, 1)
    assert optimizer.skipped_steps == 1
    assert not torch.equal(matrices[0], weights[0])


@pytest.mark.parametrize("manifold", NAMES)
def test_low_rank_gradients_are_fine(manifold: str) -> None:
    """Protects embeddings-like gradients: of rank zero nothing moves, of rank one the step is finite and bounded."""
    for shape in SHAPES:
        p = parameter(*shape)
        optimizer = ManifoldMuon([p], lr=0.1, manifold=manifold)
        old = p.detach().clone()
        p.grad = torch.zeros_like(p)
        optimizer.step()
        torch.testing.assert_close(p.detach(), old, atol=1e-6, rtol=1e-6)
        assert optimizer.statistics()[0].certified_ratio == 1
        p.grad = gaussian(shape[0], 1) @ gaussian(1, shape[1], seed=1)
        for _ in range(2):
            optimizer.step()
        assert p.isfinite().all()
        assert 1e-3 < torch.linalg.matrix_norm(p.detach() - old, 2) < 0.25


@pytest.mark.parametrize(
    ("data", "manifold", "message"),
    [
        (torch.zeros(5), "euclidean", "this has shape (5,)"),
        (torch.zeros(3, 4, 5), "euclidean", "this has shape (3, 4, 5)"),
        (torch.zeros(()), "euclidean", "this has shape ()"),
        (torch.zeros(0, 4), "stiefel", "this has shape (0, 4)"),
        (torch.zeros(4, 3, dtype=torch.complex64), "euclidean", "this is torch.complex64"),
        (torch.ones(4, 3, dtype=torch.bfloat16), "stiefel", "must be float32, this is torch.bfloat16"),
        (torch.ones(4, 3, dtype=torch.float16), "dgram", "must be float32"),
        (torch.zeros(4, 3), "stiefel", "no full rank"),
        (torch.zeros(4, 3), "oblique", "has no direction"),
        (torch.full((4, 3), math.nan), "stiefel", "NaN"),
        (torch.full((4, 3), math.inf), "dgram", "infinite"),
    ],
)
def test_parameters_that_it_cannot_step_are_refused_by_name(data: Tensor, manifold: str, message: str) -> None:
    """Protects the user from an error in the middle of a step: each is named, in one line, when it is built."""
    with pytest.raises(UserError) as caught:
        ManifoldMuon([("model.some.weight", Parameter(data))], manifold=manifold)
    assert str(caught.value).startswith("model.some.weight: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "optimizer.lr must be at least 0, got -1.0"),
        ({"lr": math.nan}, "optimizer.lr must be at least 0, got nan"),
        ({"momentum": 1.0}, "optimizer.momentum must be in [0, 1), got 1.0"),
        ({"weight_decay": -0.1}, "optimizer.weight_decay"),
        ({"iterations": -1}, "optimizer.iterations"),
        ({"solver": "newton"}, "optimizer.solver must be one of reweighted, dual_ascent, projected, got 'newton'"),
        ({"adjust_lr_fn": "both"}, "optimizer.adjust_lr_fn must be original, match_rms_adamw or none, got 'both'"),
        ({"manifold": "stifel"}, "did you mean stiefel?"),
        ({"blocks": [Block("dgramm", (0, 4))]}, "did you mean dgram?"),
        ({"blocks": [Block("dgram", (8, 16))]}, "w: rows (8, 16) and columns None do not lie within its shape (8, 6)"),
        ({"blocks": [Block("dgram", (0, 9))]}, "w: rows (0, 9) and columns None do not lie within its shape (8, 6)"),
        ({"blocks": [Block("dgram", None, (3, 7))]}, "w: rows None and columns (3, 7) do not lie within"),
        ({"blocks": [Block("dgram", (0, 8), None, True)]}, "do not lie within its shape (8, 6)"),
    ],
)
def test_options_without_a_meaning_are_refused(options: dict[str, Any], message: str) -> None:
    """Protects the user from options that are silently clipped or ignored."""
    with pytest.raises(UserError) as caught:
        ManifoldMuon([("w", parameter(8, 6))], **options)
    assert message in str(caught.value)


def test_frozen_matrices_and_those_without_a_gradient_are_left_alone() -> None:
    """Protects frozen weights: not even projected; and weights out of use, which keep their momentum."""
    frozen, idle, active = parameter(12, 6), parameter(12, 6, seed=1), parameter(12, 6, seed=2)
    frozen.requires_grad_(False)
    given = frozen.clone()
    optimizer = ManifoldMuon([("frozen", frozen), ("idle", idle), ("active", active)], manifold="stiefel")
    assert torch.equal(frozen, given)
    assert Stiefel().check_point_on_manifold(idle.detach())[0]
    start = idle.detach().clone()
    active.grad = gaussian(12, 6)
    optimizer.step()
    assert torch.equal(frozen, given)
    assert torch.equal(idle, start)
    assert [each.parameter for each in optimizer.statistics()] == ["active"]
    idle.grad = gaussian(12, 6, seed=4)  # one with a multiplier, one without: both go on
    active.grad = gaussian(12, 6, seed=5)
    optimizer.step()
    assert not torch.equal(idle, start)
    assert {each.parameter for each in optimizer.statistics()} == {"idle", "active"}


@pytest.mark.parametrize("transposed", [False, True])
def test_blocks_of_a_fused_matrix_equal_separate_matrices(transposed: bool) -> None:
    """Protects q, k and v: fused storage, also in x out, must not be orthogonalised as one matrix."""
    parts = [gaussian(16, 24, seed=i) / 5 for i in range(3)]
    kinds: list[Any] = ["stiefel", {"name": "dgram", "lo": 0.1}, "euclidean"]
    whole = torch.cat(parts)
    fused = Parameter((whole.T if transposed else whole).clone())
    options: Any = {"lr": 0.05, "weight_decay": 0.1, "adjust_lr_fn": "original"}
    blocks = [Block(kind, (16 * i, 16 * i + 16), None, transposed) for i, kind in enumerate(kinds)]
    together = ManifoldMuon([("fused", fused)], blocks=blocks, **options)
    separate = [Parameter(part.clone()) for part in parts]
    apart = [ManifoldMuon([p], manifold=kind, **options) for p, kind in zip(separate, kinds, strict=True)]
    for step in range(4):
        g = gaussian(48, 24, seed=step)
        fused.grad = g.T.clone() if transposed else g.clone()
        together.step()
        for i, (p, optimizer) in enumerate(zip(separate, apart, strict=True)):
            p.grad = g[16 * i : 16 * i + 16].clone()
            optimizer.step()
    found = fused.T if transposed else fused
    torch.testing.assert_close(found, torch.cat([p.detach() for p in separate]), atol=1e-5, rtol=0.0)
    assert [(s.parameter, s.block, s.manifold) for s in together.statistics()] == [
        ("fused", 0, "stiefel"),
        ("fused", 1, "dgram"),
        ("fused", 2, "euclidean"),
    ]


@pytest.mark.parametrize("manifold", NAMES)
def test_a_wide_matrix_steps_as_its_transpose(manifold: str) -> None:
    """Protects wide matrices: the constraint and the step are those of the transpose."""
    wide = parameter(16, 48)
    tall = Parameter(wide.detach().T.clone())
    a, b = ManifoldMuon([wide], manifold=manifold), ManifoldMuon([tall], manifold=manifold)
    for step in range(3):
        wide.grad = gaussian(16, 48, seed=step)
        tall.grad = wide.grad.T.clone()
        a.step()
        b.step()
    torch.testing.assert_close(wide.T, tall, atol=1e-5, rtol=0.0)


@pytest.mark.parametrize("manifold", ["stiefel", "dgram", "oblique"])
def test_scaled_gradients_make_the_same_run(manifold: str) -> None:
    """Protects small losses and loss scaling: gradients of 1e-6 lead where gradients of 1 do."""
    (p, a), (q, b) = ((p := parameter(48, 16), ManifoldMuon([p], manifold=manifold)) for _ in range(2))
    for step in range(4):
        p.grad = gaussian(48, 16, seed=step)
        q.grad = p.grad * 1e-6
        a.step()
        b.step()
    torch.testing.assert_close(p, q, atol=1e-4, rtol=0.0)


def test_statistics_name_every_matrix_and_tell_the_truth() -> None:
    """Protects the log: names, in float, with the length of the step that was taken; nothing before the first."""
    p, q = parameter(48, 16), parameter(24, 24)
    groups: list[dict[str, Any]] = [
        {"params": [("a.weight", p)], "manifold": "stiefel"},
        {"params": [("b.weight", q)], "manifold": "dgram"},
    ]
    optimizer = ManifoldMuon(groups, lr=1e-3)
    assert optimizer.statistics() == []
    old = p.detach().clone()
    run(optimizer)
    found = {each.parameter: each for each in optimizer.statistics()}
    assert set(found) == {"a.weight", "b.weight"}
    assert (found["a.weight"].manifold, found["b.weight"].manifold) == ("stiefel", "dgram")
    assert 0.9 < found["a.weight"].certified_ratio <= 1.001
    assert found["a.weight"].update_rms == pytest.approx(float((p.detach() - old).square().mean().sqrt()), rel=1e-2)
    assert 0 <= found["b.weight"].tangent_residual < 0.1
    direction = (p.grad * 1.95).double()  # type: ignore[operator]
    assert found["a.weight"].objective == pytest.approx(float((direction * (old - p.detach())).sum() / 1e-3), rel=1e-2)


def test_the_closure_is_evaluated_once_and_with_gradients() -> None:
    """Protects Lightning's automatic optimization, where the closure is the backward pass."""
    p, calls = parameter(8, 4), []
    optimizer = ManifoldMuon([p])

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = (p * gaussian(8, 4)).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).requires_grad
    assert calls == [True]
    assert p.requires_grad
    assert p.is_leaf


@pytest.mark.parametrize("manifold", [Stiefel(), DGram(), Oblique()], ids=repr)
def test_steps_descend(manifold: Any) -> None:
    """Protects the sign: a linear loss goes down along the manifold, to near the least it can be on Stiefel."""
    g = gaussian(24, 8)
    p = parameter(24, 8)
    optimizer = ManifoldMuon([p], lr=0.05, manifold=manifold.name)
    first = float((p.detach() * g).sum())
    for _ in range(100):
        p.grad = g.clone()
        optimizer.step()
    assert (p * g).sum() < first - 1
    if isinstance(manifold, Stiefel):
        assert (p * g).sum() < -0.97 * torch.linalg.svdvals(g).sum()
