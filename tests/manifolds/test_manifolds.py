"""Constraints: points, tangents, ways back, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from geocont.errors import UserError
from geocont.manifolds import MANIFOLDS, DGram, Euclidean, Manifold, Oblique, Stiefel, as_manifold

CONSTRAINED = [Stiefel(), DGram(), DGram(0.5, 2.0), Oblique()]
SHAPES = [(48, 16), (16, 48), (24, 24), (3, 20, 8), (5, 1)]


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def constraint(manifold: Manifold, w: Tensor) -> Tensor:
    """What is zero on the manifold, in float64 and in this test's own words."""
    tall = (w if w.shape[-2] >= w.shape[-1] else w.mT).double()
    norms = tall.norm(dim=-2)
    gram = tall.mT @ tall
    if isinstance(manifold, Stiefel):
        return gram - torch.eye(gram.shape[-1], dtype=torch.float64)
    if isinstance(manifold, Oblique):
        return norms.square() - 1
    outside = (manifold.lo - norms).clamp_min(0) + (norms - manifold.hi).clamp_min(0)
    cosines = gram / (norms[..., :, None] * norms[..., None, :])
    return cosines - torch.eye(gram.shape[-1], dtype=torch.float64) + torch.diag_embed(outside)


def on(manifold: Manifold, w: Tensor, atol: float = 1e-5) -> bool:
    """Asks the constraint, and that the manifold's own answer is the same."""
    truly = bool(constraint(manifold, w).abs().max() <= atol)
    assert manifold.check_point_on_manifold(w)[0] == truly
    return truly


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("manifold", CONSTRAINED, ids=repr)
def test_projected_points_lie_on_the_manifold_and_stay_there(manifold: Manifold, shape: tuple[int, ...]) -> None:
    """Protects the start of training: matrices land on their manifold, on the smaller side, and a second time stay."""
    w = gaussian(*shape)
    before = w.clone()
    x = manifold.projx(w)
    assert torch.equal(w, before)
    assert x.dtype == w.dtype
    assert x.shape == w.shape
    assert on(manifold, x, 1e-5)
    assert shape == (5, 1) or not on(manifold, w)
    torch.testing.assert_close(manifold.projx(x), x, atol=2e-6, rtol=2e-6)
    assert manifold.residual(x).shape == shape[:-2]


@pytest.mark.parametrize("manifold", CONSTRAINED, ids=repr)
def test_wide_is_tall_transposed(manifold: Manifold) -> None:
    """Protects wide matrices: each operation on them is that on their transpose, transposed."""
    w, u = manifold.projx(gaussian(2, 32, 12)), gaussian(2, 32, 12, seed=1)
    assert torch.equal(manifold.projx(u.mT).mT, manifold.projx(u))
    assert torch.equal(manifold.proju(w.mT, u.mT).mT, manifold.proju(w, u))
    assert torch.equal(manifold.retr(w.mT, 0.1 * u.mT).mT, manifold.retr(w, 0.1 * u))
    assert torch.equal(manifold.residual(u.mT), manifold.residual(u))
    assert torch.equal(manifold.tangent_residual(w.mT, u.mT), manifold.tangent_residual(w, u))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("manifold", CONSTRAINED, ids=repr)
def test_projected_steps_are_tangent_and_first_order_steps_stay(manifold: Manifold, shape: tuple[int, ...]) -> None:
    """Protects the tangent space: a small tangent step leaves the manifold at second order only, any other at first."""
    w, u = manifold.projx(gaussian(*shape)), gaussian(*shape, seed=1)
    tangent = manifold.proju(w, u)
    assert (manifold.tangent_residual(w, tangent) <= 3e-7).all()
    torch.testing.assert_close(manifold.proju(w, tangent), tangent, atol=1e-5, rtol=1e-5)
    free = Oblique() if isinstance(manifold, Oblique) else DGram() if isinstance(manifold, DGram) else Stiefel()
    wide, t, v = w.double(), tangent.double(), u.double()
    at_start, eps = constraint(free, wide), 1e-5
    assert (constraint(free, wide + eps * t) - at_start).abs().max() <= 100 * eps**2 * (1 + t.square().max() * 48)
    if not (isinstance(free, DGram) and shape == (5, 1)):  # one column is orthogonal to all others
        assert (constraint(free, wide + eps * v) - at_start).abs().max() >= 0.1 * eps
        assert (manifold.tangent_residual(w, u) > 1e-3).all()


@pytest.mark.parametrize("manifold", [Stiefel(), Oblique()], ids=repr)
def test_the_tangent_projection_is_orthogonal(manifold: Manifold) -> None:
    """Protects the projected gradient: what is removed is orthogonal to every tangent, so that descent is kept."""
    w = manifold.projx(gaussian(24, 8))
    u, t = gaussian(24, 8, seed=1), manifold.proju(w, gaussian(24, 8, seed=2))
    assert ((u - manifold.proju(w, u)) * t).sum().abs() <= 1e-5 * u.norm() * t.norm()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("manifold", CONSTRAINED, ids=repr)
def test_no_step_changes_nothing(manifold: Manifold, shape: tuple[int, ...]) -> None:
    """Protects converged weights from drift: 50 empty steps move them by rounding only (the paper's by 3 %)."""
    w = manifold.projx(gaussian(*shape))
    x = w
    for _ in range(50):
        x = manifold.retr(x, torch.zeros_like(x))
        if x is not w:
            torch.testing.assert_close(x, w, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(manifold.retr(w, torch.zeros_like(w)), w, atol=1e-6, rtol=1e-6)


def test_dgram_keeps_the_order_and_the_norms_of_columns() -> None:
    """Protects DGram from the published retraction, which sorts singular values: norms (1, 5) came back as (5, 1)."""
    q = torch.linalg.qr(gaussian(40, 4).double())[0].float()
    norms = torch.tensor([1.0, 5.0, 0.2, 3.0])
    w, manifold = q * norms, DGram()
    for x in (manifold.retr(w, torch.zeros_like(w)), manifold.projx(w)):
        torch.testing.assert_close(x, w, atol=1e-6, rtol=1e-6)
    moved = manifold.retr(w, 0.003 * manifold.proju(w, gaussian(40, 4, seed=1)))
    assert on(manifold, moved)
    torch.testing.assert_close(moved.norm(dim=0), norms, atol=0.02, rtol=0.1)
    assert (torch.nn.functional.cosine_similarity(moved, w, dim=0) > 0.7).all()
    assert (moved - w).norm() > 0.005
    mixed = w + 0.05 * gaussian(40, 4, seed=2) * norms
    torch.testing.assert_close(manifold.projx(mixed).norm(dim=0), mixed.norm(dim=0), rtol=0.1, atol=0.0)


@pytest.mark.parametrize("size", [1.0, 30.0])
@pytest.mark.parametrize("shape", [(48, 16), (16, 48), (24, 24)])
@pytest.mark.parametrize(("lo", "hi"), [(0.5, 2.0), (0.0, 0.1), (10.0, math.inf), (1.0, 1.0)])
def test_dgram_keeps_norms_within_their_bounds(lo: float, hi: float, shape: tuple[int, int], size: float) -> None:
    """Protects the scale that bounds control: points and steps of any size end inside them, on the right side."""
    manifold = DGram(lo, hi)
    scales = torch.logspace(-2, 2, shape[1]) if shape[0] >= shape[1] else torch.logspace(-2, 2, shape[0])[:, None]
    w = manifold.projx(gaussian(*shape) * scales)
    step = manifold.retr(w, size * manifold.proju(w, gaussian(*shape, seed=1)) / shape[0] ** 0.5)
    for x in (w, step):
        norms = x.norm(dim=0 if shape[0] >= shape[1] else 1)
        assert norms.min() >= lo * (1 - 1e-5)
        assert norms.max() <= hi * (1 + 1e-5)
        assert on(manifold, x, 1e-5)
    free = DGram().projx(gaussian(*shape) * scales)
    said, why = manifold.check_point_on_manifold(free)
    assert not said
    assert "do not lie within" in str(why)


@pytest.mark.parametrize("lr", [0.3, 1.0, 10.0, 100.0])
@pytest.mark.parametrize("kind", ["gaussian", "rank one"])
@pytest.mark.parametrize("shape", [(48, 16), (16, 48), (24, 24)])
@pytest.mark.parametrize("manifold", CONSTRAINED, ids=repr)
def test_big_steps_still_end_on_the_manifold(manifold: Manifold, shape: tuple[int, int], kind: str, lr: float) -> None:
    """Protects a run whose learning rate is far too large: what it returns is on the manifold all the same."""
    w = manifold.projx(gaussian(*shape))
    u = (
        gaussian(*shape, seed=1)
        if kind == "gaussian"
        else gaussian(shape[0], 1, seed=1) @ gaussian(1, shape[1], seed=2)
    )
    tangent = manifold.proju(w, u)
    x = manifold.retr(w, lr * tangent / torch.linalg.matrix_norm(tangent, 2))
    assert float(constraint(manifold, x).abs().max()) <= 1e-5
    assert manifold.check_point_on_manifold(x) == (True, None)


@pytest.mark.parametrize("manifold", CONSTRAINED, ids=repr)
def test_a_hundred_random_steps_do_not_drift(manifold: Manifold) -> None:
    """Protects long runs: the distance from the manifold does not add up over steps."""
    torch.manual_seed(0)
    w = manifold.projx(torch.randn(32, 12))
    for _ in range(100):
        u = manifold.proju(w, torch.randn(32, 12))
        w = manifold.retr(w, 0.05 * u / torch.linalg.matrix_norm(u, 2))
    assert on(manifold, w, 1e-5)


def test_points_off_the_manifold_come_with_a_reason() -> None:
    """Protects messages: what is wrong with a point is said, with its size."""
    w = Stiefel().projx(gaussian(12, 5))
    assert Stiefel().check_point_on_manifold(w) == (True, None)
    assert Stiefel().check_point_on_manifold(1.1 * w) == (False, "max |W^T W - I| is 2.10e-01, above 1e-05")
    assert Stiefel().check_point_on_manifold(1.1 * w, atol=0.3) == (True, None)
    assert Oblique().check_point_on_manifold(1.1 * w)[1] == "max |diag(W^T W) - 1| is 2.10e-01, above 1e-05"
    assert DGram().check_point_on_manifold(1.1 * w) == (True, None)
    assert "relative to the columns' norms" in str(DGram().check_point_on_manifold(gaussian(12, 5))[1])
    zero = w.clone()
    zero[:, 2] = 0
    assert DGram().check_point_on_manifold(zero) == (False, "a column is zero")
    batch = torch.stack([w, w + 0.1, w])
    for manifold in (Stiefel(), DGram(), Oblique()):
        assert not manifold.check_point_on_manifold(batch)[0]
        assert manifold.check_point_on_manifold(batch[::2])[0]
        assert "must be a matrix" in str(manifold.check_point_on_manifold(w[0])[1])
        for bad in (math.nan, math.inf):
            poisoned = w.clone()
            poisoned[3, 1] = bad
            assert "NaN" in str(manifold.check_point_on_manifold(poisoned)[1])


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("what", ["a zero column", "nothing but zeros", "two columns alike", "rank three", "a batch"])
@pytest.mark.parametrize("manifold", [Stiefel(), DGram(), Oblique()], ids=repr)
def test_matrices_without_a_place_on_the_manifold_are_refused(manifold: Manifold, what: str, wide: bool) -> None:
    """Protects the user from NaNs or an arbitrary basis where a matrix has no nearest point: one line, no trace."""
    w = gaussian(12, 5)
    if what == "a zero column":
        w[:, 2] = 0
    elif what == "nothing but zeros":
        w = torch.zeros(12, 5)
    elif what == "two columns alike":
        w[:, 3] = 2 * w[:, 1]
    elif what == "rank three":
        w = gaussian(12, 3) @ gaussian(3, 5, seed=1)
    else:
        w = torch.stack([w, torch.zeros(12, 5)])
    w = w.mT if wide else w
    if isinstance(manifold, Oblique) and what in ("two columns alike", "rank three"):
        assert on(manifold, manifold.projx(w))  # columns have directions, and that is all it asks
        return
    with pytest.raises(UserError) as caught:
        manifold.projx(w)
    assert "\n" not in str(caught.value)
    assert "12 x 5" in str(caught.value)
    assert "initialise it otherwise" in str(caught.value)


@pytest.mark.parametrize("condition", [1e2, 1e4])
@pytest.mark.parametrize("scale", [1e-12, 1e8])
@pytest.mark.parametrize("manifold", CONSTRAINED, ids=repr)
def test_ill_conditioned_and_badly_scaled_matrices_find_their_place(
    manifold: Manifold, scale: float, condition: float
) -> None:
    """Protects pretrained weights of any scale: full rank is enough, and Stiefel's point is the nearest one."""
    u, _, vh = torch.linalg.svd(gaussian(48, 16).double(), full_matrices=False)
    w = ((u * torch.logspace(0, -math.log10(condition), 16, dtype=torch.float64)) @ vh * scale).float()
    x = manifold.projx(w)
    assert on(manifold, x, 1e-5)
    if isinstance(manifold, Stiefel):
        torch.testing.assert_close(x.double(), u @ vh, atol=1e-6 * condition, rtol=0.0)


def test_euclidean_constrains_nothing() -> None:
    """Protects unconstrained Muon: every operation is the plain one."""
    w, u = gaussian(6, 4), gaussian(6, 4, seed=1)
    manifold = Euclidean()
    assert torch.equal(manifold.projx(w), w)
    assert torch.equal(manifold.proju(w, u), u)
    assert torch.equal(manifold.retr(w, u), w + u)
    assert manifold.tangent_residual(w, u) == 0
    assert manifold.check_point_on_manifold(w) == (True, None)
    assert not manifold.check_point_on_manifold(w * math.nan)[0]


def test_manifolds_go_by_name_and_options() -> None:
    """Protects configurations: what YAML can say, and nothing else."""
    assert set(MANIFOLDS) == {"euclidean", "stiefel", "dgram", "oblique"}
    for name, kind in MANIFOLDS.items():
        assert type(as_manifold(name)) is kind
    bounded = as_manifold({"name": "dgram", "lo": 0.5, "hi": 2})
    assert repr(bounded) == "DGram(lo=0.5, hi=2)"
    assert as_manifold(bounded) is bounded
    given = {"name": "dgram", "lo": 0.5}
    as_manifold(given)
    assert given == {"name": "dgram", "lo": 0.5}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("stifel", "got 'stifel'; did you mean stiefel?"),
        ({"lo": 1}, "got None"),
        ({"name": "dgram", "low": 1}, "manifold dgram: it has no options low"),
        ({"name": "stiefel", "lo": 1}, "manifold stiefel: it has no options lo"),
        ({"name": "dgram", "lo": 2, "hi": 1}, "0 <= lo <= hi, got 2 and 1"),
        ({"name": "dgram", "lo": -1}, "0 <= lo <= hi"),
        ({"name": "dgram", "hi": 0}, "0 <= lo <= hi, got 0.0 and 0"),
        ({"name": "dgram", "hi": math.nan}, "0 <= lo <= hi"),
        (None, "got None"),
        (3, "got 3"),
        (["dgram"], "got ['dgram']"),
    ],
)
def test_what_is_no_manifold_is_refused_in_one_line(given: Any, message: str) -> None:
    """Protects the user of a configuration from a stack trace."""
    with pytest.raises(UserError) as caught:
        as_manifold(given)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
