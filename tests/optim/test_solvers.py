"""The certified bound, and the three solvers against it; a slow solver of its own in float64 is the judge."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from geocont.manifolds import DGram, Euclidean, Manifold, Oblique, Stiefel
from geocont.optim.solvers import Solution, certify, dual_ascent, projected, reweighted

CONSTRAINED = [Stiefel(), DGram(), Oblique()]
SPECTRA = ["log", "rank16", "spike", "power", "gaussian"]
SCALES = [1e-8, 1e-3, 1.0, 1e4]


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def momentum(spectrum: str, m: int, n: int, seed: int = 0) -> Tensor:
    """A momentum: singular values from 1 to 1e-6, rank 16, one spike over 1e-3 noise, a power law, or Gaussian."""
    if spectrum == "gaussian":
        return gaussian(m, n, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    u, v = (torch.linalg.qr(torch.randn(d, n, generator=generator, dtype=torch.float64))[0] for d in (m, n))
    if spectrum == "spike":
        noise = torch.randn(m, n, generator=generator, dtype=torch.float64)
        return (torch.outer(u[:, 0], v[:, 0]) + 1e-3 * noise / (m**0.5 + n**0.5)).float()
    index = torch.arange(n, dtype=torch.float64)
    s = {"log": 10 ** (-6 * index / (n - 1)), "rank16": (index < 16).double(), "power": 1 / (index + 1)}[spectrum]
    return ((u * s) @ v.T).float()


def point(manifold: Manifold, m: int, n: int, seed: int = 0) -> Tensor:
    """A point; on DGram with column norms from 0.3 to 3."""
    w = manifold.projx(gaussian(m, n, seed=100 + seed) / m**0.5)
    return manifold.projx(w * torch.logspace(-0.5, 0.5, n)) if isinstance(manifold, DGram) else w


def problems(
    manifold: Manifold, m: int, n: int, scales: Sequence[float] = (1.0,), spectra: Sequence[str] = SPECTRA
) -> tuple[Tensor, Tensor]:
    """A batch of every spectrum at every scale."""
    kinds = [(i, spectrum, scale) for i, spectrum in enumerate(spectra) for scale in scales]
    w = torch.stack([point(manifold, m, n, i) for i, _, _ in kinds])
    return w, torch.stack([momentum(spectrum, m, n, i) * scale for i, spectrum, scale in kinds])


def nuclear(x: Tensor) -> Tensor:
    return torch.linalg.svdvals(x).sum(-1)


def spectral_norm(x: Tensor) -> Tensor:
    return torch.linalg.svdvals(x.double())[..., 0]


def dual_of(solution: Solution, w: Tensor, g: Tensor, manifold: Manifold) -> Tensor:
    """Returns L, which is zero without a constraint."""
    return torch.zeros_like(w.mT @ g) if solution.dual is None else solution.dual


def ratio(solution: Solution, w: Tensor, g: Tensor, manifold: Manifold) -> Tensor:
    return certify(w, g, manifold, solution.update, dual_of(solution, w, g, manifold))


def slow_solve(w: Tensor, g: Tensor, manifold: Manifold, iterations: int = 500) -> tuple[Tensor, Tensor]:
    """Returns a feasible A and a dual L of one small problem, in float64 and by nothing but the definition.

    The nuclear norm of G + 2 W L, smoothed less and less, is minimised over coordinates of L in a basis of symmetric
    matrices by iterative reweighting with dense least squares.
    """
    m, n = w.shape
    basis = []
    for i in range(n):
        for j in range(i, n):
            e = torch.zeros(n, n, dtype=torch.float64)
            e[i, j] = e[j, i] = 1.0
            if manifold.projector(e).abs().sum() > 0:
                basis.append(manifold.projector(e))
    directions = torch.stack([2 * w @ e for e in basis])
    x, coordinates = g, torch.zeros(len(basis), dtype=torch.float64)
    for k in range(iterations):
        values, vectors = torch.linalg.eigh(x.T @ x)
        q = (vectors / (values + values[-1] * 10 ** (-2 - 10 * k / iterations)).sqrt()) @ vectors.T
        weighted = (directions @ q).flatten(1)
        system = weighted @ directions.flatten(1).T
        coordinates = -torch.linalg.lstsq(system, (weighted @ g.flatten())[:, None], driver="gelsd").solution[:, 0]
        x = g + (coordinates[:, None, None] * directions).sum(0)
    dual = (coordinates[:, None, None] * torch.stack(basis)).sum(0)
    # the tangent space is what is orthogonal to all directions
    frame = torch.linalg.qr(directions.flatten(1).T)[0]
    a = x @ q
    a = (a.flatten() - frame @ (frame.T @ a.flatten())).view(m, n)
    return a / torch.linalg.matrix_norm(a, 2).clamp_min(1), dual


@pytest.mark.parametrize("shape", [(24, 8), (12, 12)])
@pytest.mark.parametrize("manifold", CONSTRAINED, ids=repr)
def test_any_multiplier_bounds_any_tangent_step(manifold: Manifold, shape: tuple[int, int]) -> None:
    """Protects the certificate itself: <G, A> <= ||G + 2 W L||_* for tangent A of norm one and any L, not only good."""
    torch.manual_seed(0)
    w = manifold.projx(torch.randn(20, *shape, dtype=torch.float64))
    g = torch.randn(20, *shape, dtype=torch.float64)
    a = manifold.proju(w, torch.randn_like(g) + g)
    a = a / torch.linalg.svdvals(a)[:, :1, None]
    assert manifold.tangent_residual(w, a).max() < 1e-14
    for size in (0.0, 1e-2, 0.1, 1.0, 10.0):
        for _ in range(5):
            dual = torch.randn(20, shape[1], shape[1], dtype=torch.float64) * size
            dual = manifold.projector(dual + dual.mT)
            assert ((g * a).sum((-2, -1)) <= nuclear(g + 2 * w @ dual) * (1 + 1e-12)).all()
            assert (certify(w, g, manifold, a, dual) <= 1 + 1e-12).all()
            # L that is not P(L) is no multiplier: certify must not take it at its word
            raw = torch.randn_like(dual)
            assert (certify(w, g, manifold, a, raw + raw.mT) <= 1 + 1e-12).all()


@pytest.mark.parametrize("shape", [(16, 6), (7, 7)])
@pytest.mark.parametrize("manifold", CONSTRAINED, ids=repr)
def test_the_certificate_is_tight_and_never_exceeds_one(manifold: Manifold, shape: tuple[int, int]) -> None:
    """Protects every certified ratio: the optimum's is 1, and an update better than the optimum does not exist."""
    m, n = shape
    w, g = point(manifold, m, n).double(), gaussian(m, n).double()
    a, dual = slow_solve(w, g, manifold)
    primal, upper = (g * a).sum(), nuclear(g + 2 * w @ dual)
    assert 0 <= (upper - primal) / upper < 1e-3
    w, g, batched = w[None], g[None], dual[None]
    assert 0.999 < certify(w, g, manifold, a[None], batched) <= 1 + 1e-6
    long = reweighted(w.float(), g.float(), manifold, iterations=100)
    for solution in (long, reweighted(w.float(), g.float(), manifold), projected(w.float(), g.float(), manifold)):
        assert solution.objective <= upper * (1 + 1e-5)
        assert solution.bound >= primal * (1 - 1e-4)
        exact = certify(w, g, manifold, solution.update, batched)
        assert exact <= 1 + 1e-6
        assert exact == pytest.approx(float(solution.objective / upper), rel=1e-4)
        assert solution.certified_ratio <= exact + 1e-3
    assert long.objective >= 0.98 * primal
    # what is longer than one, or not tangent, is cut down before it counts
    assert certify(w, g, manifold, 100 * g, batched) <= 1 + 1e-6
    assert certify(w, g, manifold, 100 * a[None], batched) == pytest.approx(float(primal / upper), rel=1e-6)
    assert certify(w, g, manifold, -a[None], batched) == pytest.approx(-float(primal / upper), rel=1e-6)


@pytest.mark.parametrize("root", ["eigh", "newton_schulz"])
@pytest.mark.parametrize("shape", [(96, 32), (24, 24), (48, 16)])
@pytest.mark.parametrize("manifold", [*CONSTRAINED, Euclidean()], ids=repr)
def test_every_answer_is_feasible(manifold: Manifold, shape: tuple[int, int], root: str) -> None:
    """Protects the step: whatever the spectrum and the scale, A is finite, tangent and at most one long."""
    w, g = problems(manifold, *shape, scales=SCALES)
    before = w.clone(), g.clone()
    for solution in (
        reweighted(w, g, manifold, root=root),
        reweighted(w, g, manifold, root=root, iterations=0),
        reweighted(w, g, manifold, root=root, iterations=8),
        projected(w, g, manifold, root=root),
    ):
        for each in (solution.update, solution.tangent_residual, solution.objective, solution.bound):
            assert each.isfinite().all()
        assert (manifold.tangent_residual(w.double(), solution.update.double()) <= 1e-5).all()
        assert (spectral_norm(solution.update) <= 1 + 1e-4).all()
        assert (solution.certified_ratio > 0).all()
        assert (solution.certified_ratio <= 1 + 5e-3).all()
        torch.testing.assert_close(solution.objective, (g * solution.update).sum((-2, -1)), rtol=1e-4, atol=0.0)
    assert torch.equal(w, before[0])
    assert torch.equal(g, before[1])


@pytest.mark.parametrize("shape", [(96, 32), (24, 24)])
@pytest.mark.parametrize("manifold", [*CONSTRAINED, Euclidean()], ids=repr)
def test_the_scale_of_the_momentum_does_not_matter(manifold: Manifold, shape: tuple[int, int]) -> None:
    """Protects the default from the published solver's fault: its step has a scale, and small gradients make noise."""
    w, g = problems(manifold, *shape)
    reference = reweighted(w, g, manifold)
    smooth = [SPECTRA.index("power"), SPECTRA.index("gaussian")]
    for scale in (2.0**-27, 2.0**13):  # exact in float32, so that rounding is the same
        solution = reweighted(w, g * scale, manifold)
        torch.testing.assert_close(solution.update, reference.update, atol=1e-5, rtol=0.0)
        torch.testing.assert_close(solution.objective, reference.objective * scale, atol=0.0, rtol=1e-5)
    for scale in (1e-8, 1e-3, 1e4):  # not exact: null spaces turn with the rounding, the ratio stays
        solution = reweighted(w, g * scale, manifold)
        if not isinstance(manifold, DGram) or shape[0] > shape[1]:
            torch.testing.assert_close(solution.update[smooth], reference.update[smooth], atol=1e-3, rtol=0.0)
        torch.testing.assert_close(solution.certified_ratio, reference.certified_ratio, atol=3e-3, rtol=0.0)
        if solution.carry is not None and reference.carry is not None:
            torch.testing.assert_close(solution.carry[smooth], reference.carry[smooth], atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("shape", [(128, 32), (256, 64)])
@pytest.mark.parametrize("manifold", CONSTRAINED, ids=repr)
def test_eight_cold_iterations_reach_97_percent(manifold: Manifold, shape: tuple[int, int]) -> None:
    """Protects the quality of steps on tall matrices: 0.97 of the optimum, certified, on every spectrum."""
    w, g = problems(manifold, *shape)
    solution = reweighted(w, g, manifold, iterations=8)
    certified = ratio(solution, w, g, manifold)
    assert dict(zip(SPECTRA, certified.tolist(), strict=True)) == dict.fromkeys(SPECTRA, pytest.approx(1, abs=0.03))
    torch.testing.assert_close(solution.certified_ratio.double(), certified, atol=2e-2, rtol=0.0)
    default = ratio(reweighted(w, g, manifold), w, g, manifold)
    assert (default >= 0.93).all()  # three iterations, cold


@pytest.mark.parametrize("manifold", [DGram(), Oblique()], ids=repr)
def test_square_matrices_converge_more_slowly_but_do(manifold: Manifold) -> None:
    """Protects square matrices, which have almost no freedom beside rotations: the default is good, a long one better.

    The bound of `certify` may come from L = 0, and only that of the solution's own L is cheap to know: it is lower.
    """
    w, g = problems(manifold, 48, 48)
    eight, forty = (reweighted(w, g, manifold, iterations=k) for k in (8, 40))
    assert (ratio(eight, w, g, manifold) >= 0.91).all()
    assert (ratio(forty, w, g, manifold) >= 0.96).all()
    for solution in (eight, forty):
        assert (solution.certified_ratio <= ratio(solution, w, g, manifold) + 5e-3).all()


@pytest.mark.parametrize("n", [24, 25])
def test_square_stiefel_equals_its_closed_form(n: int) -> None:
    """Protects the closed form W msign((W^T G - G^T W) / 2), by SVD in float64; an odd n has a zero singular value."""
    w, g = problems(Stiefel(), n, n)
    solution = reweighted(w, g, Stiefel())
    inner = w.double().mT @ g.double()
    u, s, vh = torch.linalg.svd((inner - inner.mT) / 2)
    exact = w.double() @ ((u * (s > 1e-9 * s[..., :1])[..., None, :]) @ vh)
    # skew matrices have singular values in pairs; those far below the largest are smoothed
    sound = [SPECTRA.index(name) for name in ("power", "gaussian")] + ([SPECTRA.index("rank16")] if n == 24 else [])
    torch.testing.assert_close(solution.update[sound].double(), exact[sound], atol=2e-3, rtol=0.0)
    optimum = s.sum(-1)
    torch.testing.assert_close((g * solution.update).sum((-2, -1)).double(), optimum, rtol=6e-3, atol=0.0)
    torch.testing.assert_close(solution.bound.double(), optimum, rtol=6e-3, atol=0.0)
    assert (ratio(solution, w, g, Stiefel()) >= 0.994).all()
    assert (certify(w, g, Stiefel(), exact, dual_of(solution, w, g, Stiefel())) > 1 - 1e-6).all()
    again = reweighted(w, g, Stiefel(), iterations=0, start=solution.carry)  # nothing to iterate, nothing to start from
    assert torch.equal(again.update, solution.update)


@pytest.mark.parametrize("shape", [(96, 32), (24, 24)])
def test_euclidean_is_the_polar_factor(shape: tuple[int, int]) -> None:
    """Protects unconstrained Muon: singular values of one where those of G are not tiny, and <G, A> = ||G||_*."""
    w, g = problems(Euclidean(), *shape)
    solution = reweighted(w, g, Euclidean())
    u, s, vh = torch.linalg.svd(g.double(), full_matrices=False)
    assert (ratio(solution, w, g, Euclidean()) >= 0.98).all()
    large = s[-1] > 0.1 * s[-1, 0]
    found = (u[-1].T @ solution.update[-1].double() @ vh[-1].T).diagonal()
    torch.testing.assert_close(found[large], torch.ones_like(found)[large], atol=1e-3, rtol=0.0)
    for each in (dual_ascent(w, g, Euclidean()), projected(w, g, Euclidean())):
        assert (ratio(each, w, g, Euclidean()) >= 0.9).all()


@pytest.mark.parametrize("root", ["eigh", "newton_schulz"])
@pytest.mark.parametrize("shape", [(48, 16), (24, 24)])
@pytest.mark.parametrize("manifold", [*CONSTRAINED, Euclidean()], ids=repr)
def test_no_momentum_gives_no_update(manifold: Manifold, shape: tuple[int, int], root: str) -> None:
    """Protects weights without gradients from NaN, beside others in the batch and from a start that is not zero."""
    w, g = problems(manifold, *shape)
    g[1] = 0
    started = reweighted(w, g.roll(1, 0), manifold, root=root).carry
    for solution in (
        reweighted(w, g, manifold, root=root),
        reweighted(w, g, manifold, root=root, start=started),
        projected(w, g, manifold, root=root),
        dual_ascent(w, g, manifold),
    ):
        zero = solution.update[1]
        assert (zero == 0).all() or (started is not None and zero.isfinite().all())
        assert solution.update.isfinite().all()
        assert solution.certified_ratio[1] == 1
        assert solution.objective[1] == 0
        assert solution.certified_ratio.isfinite().all()
    cold = reweighted(w, g, manifold, root=root)
    assert (cold.update[1] == 0).all()
    if cold.dual is not None:
        assert cold.dual.isfinite().all()


@pytest.mark.parametrize("shape", [(96, 32), (24, 24)])
@pytest.mark.parametrize("manifold", CONSTRAINED, ids=repr)
def test_a_warm_start_helps_while_the_momentum_changes_slowly(manifold: Manifold, shape: tuple[int, int]) -> None:
    """Protects three iterations a step: kept multipliers must not be worse than none, and better after a while."""
    w, g = problems(manifold, *shape)
    start, gains = None, []
    for step in range(6):
        warm, cold = (reweighted(w, g, manifold, start=each, iterations=3) for each in (start, None))
        gains.append(ratio(warm, w, g, manifold) - ratio(cold, w, g, manifold))
        start = warm.carry
        change = torch.stack([momentum(name, *shape, seed=50 + step) for name in SPECTRA])
        size = torch.linalg.matrix_norm(g, keepdim=True) / torch.linalg.matrix_norm(change, keepdim=True)
        g = g + 0.05 * size * change
    gain = torch.stack(gains[1:])
    assert (gains[0] == 0).all()
    assert (gain >= -2e-3).all()
    if not (isinstance(manifold, Stiefel) and shape[0] == shape[1]):
        assert (gain[-1] > 0).sum() >= 4
        assert gain.mean() > 1e-4
        exact = reweighted(w, g, manifold, iterations=60)
        assert ratio(warm, w, g, manifold).mean() <= ratio(exact, w, g, manifold).mean() + 5e-3


@pytest.mark.parametrize("shape", [(48, 16), (128, 32), (24, 24)])
@pytest.mark.parametrize("manifold", [*CONSTRAINED, Euclidean()], ids=repr)
def test_products_only_are_as_good_as_eigenvalues(manifold: Manifold, shape: tuple[int, int]) -> None:
    """Protects accelerators: their root gives the same quality, and never claims more than it has."""
    w, g = problems(manifold, *shape)
    by_eigh = reweighted(w, g, manifold)
    by_products = reweighted(w, g, manifold, root="newton_schulz")
    certified = ratio(by_products, w, g, manifold)
    assert (certified - ratio(by_eigh, w, g, manifold)).abs().max() <= 0.03
    assert (by_products.certified_ratio <= certified + 5e-3).all()
    assert (by_products.certified_ratio >= by_eigh.certified_ratio - 0.06).all()  # its bound includes the smoothing


@pytest.mark.parametrize("manifold", [Stiefel(), DGram()], ids=repr)
def test_the_default_dominates_the_published_solver_and_the_cheap_one(manifold: Manifold) -> None:
    """Protects the reason for the default: more of the optimum than either, on every spectrum.

    On a spike and Stiefel the cheap one finds the same step: which is ahead there is a matter of rounding (3e-6).
    """
    for scale in (1e-3, 1.0):
        w, g = problems(manifold, 96, 32, scales=[scale])
        solution = reweighted(w, g, manifold)
        dual = dual_of(reweighted(w, g, manifold, iterations=20), w, g, manifold)
        ours, published, cheap = (
            certify(w, g, manifold, each.update, dual)
            for each in (solution, dual_ascent(w, g, manifold), projected(w, g, manifold))
        )
        assert (ours > published).all()
        assert (ours > cheap - 1e-5).all()
        assert (ours > cheap + 0.005).sum() >= 4


def test_the_published_solver_is_as_published() -> None:
    """Protects comparisons: 20 steps of length 0.1 (1 - t/T) from -P(W^T G + G^T W) / 4, here in float64."""
    w, g = problems(DGram(), 48, 16, spectra=["power", "gaussian"])
    solution = dual_ascent(w, g, DGram(), iterations=5, dtype=torch.float32)
    wide, wanted = w.double(), g.double()

    def msign(x: Tensor) -> Tensor:
        u, _, vh = torch.linalg.svd(x, full_matrices=False)
        return u @ vh

    def off(x: Tensor) -> Tensor:
        return (x + x.mT) * (1 - torch.eye(16, dtype=torch.float64))

    dual = -off(wide.mT @ wanted) / 4
    for t in range(5):
        dual = dual - 0.1 * (1 - t / 5) * off(wide.mT @ msign(wanted + 2 * wide @ dual))
    torch.testing.assert_close(solution.update.double(), msign(wanted + 2 * wide @ dual), atol=1e-3, rtol=0.0)
    inner = wide.mT @ solution.update.double()
    off_norm = torch.linalg.matrix_norm(off(inner))
    expected = off_norm / (torch.linalg.matrix_norm(wide) * torch.linalg.matrix_norm(solution.update.double()))
    torch.testing.assert_close(solution.tangent_residual.double(), expected, rtol=1e-3, atol=1e-7)
    default = dual_ascent(w, g, DGram())
    assert torch.equal(default.update, dual_ascent(w, g, DGram(), iterations=20, dtype=torch.bfloat16).update)
    assert not torch.equal(default.update, dual_ascent(w, g, DGram(), iterations=20, dtype=torch.float32).update)


@pytest.mark.parametrize("manifold", CONSTRAINED, ids=repr)
@pytest.mark.parametrize("solver", [reweighted, projected])
def test_a_batch_equals_its_matrices_one_by_one(solver: Callable[..., Solution], manifold: Manifold) -> None:
    """Protects batching: what one matrix gets does not depend on those it is solved with."""
    for shape in ((48, 16), (24, 24)):
        w, g = problems(manifold, *shape, scales=[1e-3, 10.0], spectra=["power", "gaussian"])
        together = solver(w, g, manifold)
        for i in range(len(w)):
            alone = solver(w[i : i + 1], g[i : i + 1], manifold)
            torch.testing.assert_close(together.update[i], alone.update[0], atol=2e-3, rtol=0.0)


@pytest.mark.parametrize("manifold", CONSTRAINED, ids=repr)
def test_awkward_gradients_and_points_are_finite(manifold: Manifold) -> None:
    """Protects from dead units: one entry, one column, W itself, the normal space, a column of tiny norm."""
    for m, n in ((24, 8), (8, 8), (5, 1), (1, 1)):
        w = point(manifold, m, n)
        if isinstance(manifold, DGram):
            w[:, 0] *= 1e-3
        one, column = torch.zeros(m, n), torch.zeros(m, n)
        one[0, 0], column[:, -1] = 1.0, gaussian(m)
        normal = w @ manifold.projector(gaussian(n, n) + gaussian(n, n).mT)
        g = torch.stack([one, column, w, -w, normal, gaussian(m, n) * math.pi])
        batch = w.expand_as(g).contiguous()
        for root in ("eigh", "newton_schulz"):
            solution = reweighted(batch, g, manifold, root=root)
            assert solution.update.isfinite().all()
            assert solution.certified_ratio.isfinite().all()
            assert (spectral_norm(solution.update) <= 1 + 1e-4).all()
            assert (manifold.tangent_residual(batch.double(), solution.update.double()) <= 1e-5).all()
            assert (solution.objective >= -1e-5 * torch.linalg.matrix_norm(g)).all()


@pytest.mark.parametrize("share", [0.3, 0.03, 0.003, 0.0])
@pytest.mark.parametrize("shape", [(256, 64), (64, 64)])
@pytest.mark.parametrize("manifold", CONSTRAINED, ids=repr)
def test_what_is_normal_to_the_manifold_does_not_drown_the_rest(
    manifold: Manifold, shape: tuple[int, int], share: float
) -> None:
    """Protects steps near a constrained optimum, where almost nothing of the gradient is tangent."""
    torch.manual_seed(0)
    w = manifold.projx(torch.randn(1, *shape) / shape[0] ** 0.5)
    tangent = manifold.proju(w, torch.randn(1, *shape))
    normal = torch.randn(1, shape[1], shape[1])
    normal = w @ manifold.projector(normal + normal.mT)
    g = share * tangent / tangent.norm() + normal / normal.norm()
    solution = reweighted(w, g, manifold)
    assert torch.isfinite(solution.update).all()
    if share:
        assert solution.certified_ratio > 0.93
        assert ratio(solution, w, g, manifold) > 0.93
    else:  # what rounding leaves of it
        assert (g * solution.update).sum().abs() < 1e-4


class Columns(Manifold):
    """A user's own: what Oblique is, known to the solver by its projector and metric only."""

    name = "columns"

    def projector(self, x: Tensor) -> Tensor:
        return torch.diag_embed(x.diagonal(dim1=-2, dim2=-1))

    def metric(self, w: Tensor) -> Tensor:
        return w.mT @ w

    def _retract(self, w: Tensor) -> Tensor:
        return torch.nn.functional.normalize(w, dim=-2)

    def _residual(self, gram: Tensor) -> Tensor:
        return (gram.diagonal(dim1=-2, dim2=-1) - 1).abs().amax(-1)


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_a_manifold_of_ones_own_is_solved_as_well(spectrum: str) -> None:
    """The solver's general way took the metric for a diagonal, which it need not be."""
    own, known = Columns(), Oblique()
    w, g = point(known, 48, 16)[None], momentum(spectrum, 48, 16)[None]
    solution, expected = (reweighted(w.float(), g.float(), manifold, iterations=8) for manifold in (own, known))
    assert ratio(solution, w, g, own).item() > 0.97
    assert solution.objective.item() == pytest.approx(expected.objective.item(), rel=0.01)
