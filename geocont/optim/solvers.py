"""The problem of one optimizer step on a manifold, and three ways to solve it.

For a tall W on the manifold and the momentum G, both m x n:

    maximise <G, A>   subject to   ||A||_2 <= 1   and   P(W^T A + A^T W) = 0

The dual problem is to minimise ||G + 2 W L||_* over symmetric L = P(L); then A = msign(G + 2 W L). Any tangent A of
norm one and any L bound the optimum from below and above, so the quality of an answer is one certified number:
<G, A> / ||G + 2 W L||_*, 1 for the optimum (Bernstein 2025, "Modular Manifolds"; arXiv 2606.13276 for DGram).

All solvers take batches ``(B, m, n)`` of float32 with m >= n, W on the manifold and G finite.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from geocont.linalg.polar import Root, msign
from geocont.manifolds import DGram, Euclidean, Manifold, Stiefel
from geocont.optim.problem import Solution, pose, scaled, shortened, singular_values, unconstrained, weigh

__all__ = ["SOLVERS", "Solution", "certify", "dual_ascent", "long_solve", "projected", "reweighted"]

SOLVERS = ("reweighted", "dual_ascent", "projected")

#: Factors of the steps on L; the last one is repeated. Majorants are too steep, up to twice near the optimum.
RELAXATION = (1.0, 1.5, 1.8)
#: Iterations by default, also of tall and of square matrices on DGram: the square ones leave A little freedom beside
#: rotations and converge slowly.
ITERATIONS, ITERATIONS_DGRAM, ITERATIONS_SQUARE_DGRAM = 3, 4, 8
#: Share of its last correction that L starts from where the multiplier of the projected gradient is its origin.
KEPT = 0.8
#: Share of G that is tangent (of its norm) above which a tall matrix starts without a multiplier instead.
SHARE = 0.4
#: The published solver: number of steps on L, length of the first, Polar Express steps in each.
ASCENTS, ASCENT_STEP, ASCENT_POLAR_STEPS = 20, 0.1, 10


def reweighted(
    w: Tensor,
    g: Tensor,
    manifold: Manifold,
    *,
    iterations: int | None = None,
    start: Tensor | None = None,
    root: Root = "eigh",
) -> Solution:
    """Minimises the smoothed nuclear norm tr (X^T X + e I)^(1/2), X = G + 2 W L, by iterative reweighting.

    For Q = (X^T X + e I)^(-1/2) the majorant tr(X^T X Q) / 2 is quadratic in L. Its minimiser solves
    P[(C + 2 D L) Q + Q (C^T + 2 L D)] = 0 with C = W^T G and D = W^T W: a Lyapunov equation on Stiefel, one linear
    system on Oblique, conjugate gradients on DGram. Steps are over-relaxed. All of this is n x n: the tall factors come
    in through C and G^T G. In the end A = X Q is projected onto the tangent space, its singular values above one are
    cut, it is projected again, what is still above one is inverted, s -> 1/s, and it is projected once more; to divide
    by the norm instead would shorten the step in every direction for the sake of a few. Without a constraint A is
    msign(G), and on square Stiefel matrices it has a closed form, W msign((W^T G - G^T W) / 2).

    Args:
        w: Points ``(B, m, n)``.
        g: Momenta ``(B, m, n)`` of any scale.
        manifold: The constraint.
        iterations: Each costs an inverse square root and twelve products of n x n matrices. By default 3; on
            DGram 4, and 8 for square matrices.
        start: ``carry`` of an earlier solution at nearby W and G; by default nothing.
        root: How inverse square roots are taken: ``eigh``, or ``newton_schulz``, products only, for accelerators.

    Returns:
        The solution; A is tangent to 1e-6 and its spectral norm is at most 1 + 1e-6.
    """
    if isinstance(manifold, Euclidean):
        return unconstrained(g, root)
    problem, scale = pose(w, g, manifold, root)
    square = w.shape[-2] == w.shape[-1]
    if isinstance(manifold, Stiefel) and square:
        return scaled(problem.closed_form(), scale)
    if iterations is None:
        iterations = default_iterations(manifold, square)
    # The multiplier of the projected gradient, 0 here, is nearly right for a square matrix, which is nearly all
    # rotation, and where little of G is tangent. For other tall matrices no multiplier at all is nearer to the truth.
    lifted = (problem.share > SHARE) & (not square)
    origin = torch.where(lifted, problem.lifting, 0)
    dual = origin if start is None else origin + torch.where(lifted, 1, KEPT) * start
    for k in range(iterations):
        dual = dual + RELAXATION[min(k, len(RELAXATION) - 1)] * problem.step(problem.reweigh(dual), dual)
    return scaled(problem.answer(dual, dual - origin), scale)


def default_iterations(manifold: Manifold, square: bool) -> int:
    """Returns the number of iterations of :func:`reweighted` where none is given."""
    if isinstance(manifold, DGram):
        return ITERATIONS_SQUARE_DGRAM if square else ITERATIONS_DGRAM
    return ITERATIONS


def projected(w: Tensor, g: Tensor, manifold: Manifold, *, root: Root = "eigh") -> Solution:
    """Takes msign of the Riemannian gradient, the projection of G onto the tangent space: one step, the cheap baseline.

    The result is projected and divided by its norm where that exceeds one (SPEL, arXiv 2601.21487, is of this kind).
    """
    if isinstance(manifold, Euclidean):
        return unconstrained(g, root)
    problem, scale = pose(w, g, manifold, root)
    weights = weigh(problem.gram, root)
    update = problem.g @ weights.q
    inner = w.mT @ update
    feasible = update - w @ manifold.multiplier(problem.d, inner)
    residual = problem.tangency(inner, update.mT @ update)
    solution = problem.solution(shortened(feasible, root), torch.zeros_like(problem.c), None, residual, weights.bound)
    return scaled(solution, scale)


def dual_ascent(
    w: Tensor,
    g: Tensor,
    manifold: Manifold,
    *,
    iterations: int = ASCENTS,
    dtype: torch.dtype = torch.bfloat16,
) -> Solution:
    """The published solver (arXiv 2606.13276), faithful to it: what the paper's runs used, not what to use.

    From L = -P(W^T G + G^T W) / 4 it takes ``iterations`` steps L <- L - 0.1 (1 - t/T) P(W^T A + A^T W) with
    A = msign(G + 2 W L), ten steps of Polar Express in ``dtype``. The step has no scale, so the result depends on that
    of G; A is neither projected nor divided by its norm.
    """
    if isinstance(manifold, Euclidean):
        update = msign(g, "polar_express", ASCENT_POLAR_STEPS, dtype)
        objective = (g * update).sum((-2, -1))
        return Solution(update, None, None, torch.zeros_like(objective), objective, objective)
    inner = w.mT @ g
    dual = -manifold.projector(inner + inner.mT) / 4
    for t in range(iterations):
        update = msign(g + 2 * w @ dual, "polar_express", ASCENT_POLAR_STEPS, dtype)
        inner = w.mT @ update
        dual = dual - ASCENT_STEP * (1 - t / iterations) * manifold.projector(inner + inner.mT)
    x = g + 2 * w @ dual
    update = msign(x, "polar_express", ASCENT_POLAR_STEPS, dtype)
    return Solution(
        update,
        dual,
        None,
        manifold.tangent_residual(w, update),
        (g * update).sum((-2, -1)),
        (x * update).sum((-2, -1)),  # of an exact msign, the nuclear norm of x
    )


@torch.no_grad()
def certify(w: Tensor, g: Tensor, manifold: Manifold, update: Tensor, *duals: Tensor) -> Tensor:
    """Returns the certified ratio ``(B)`` of any update, the slow and exact way: in float64, by singular values.

    The update is projected onto the tangent space and divided by its norm where that exceeds one. The upper bound is
    the least over the given dual variables L ``(B, n, n)`` (of the scale of G) and L = 0. A zero G has ratio 1.
    """
    w, g, update = w.double(), g.double(), update.double()
    tangent = manifold.proju(w, update)
    tangent = tangent / singular_values(tangent).amax(-1)[..., None, None].clamp_min(1)
    bounds = [singular_values(g + 2 * w @ manifold.projector(dual.double())).sum(-1) for dual in duals]
    bound = torch.stack([singular_values(g).sum(-1), *bounds]).amin(0)
    return torch.where(bound > 0, (g * tangent).sum((-2, -1)) / torch.where(bound > 0, bound, 1), 1)


@torch.no_grad()
def long_solve(w: Tensor, g: Tensor, manifold: Manifold, iterations: int = 60) -> tuple[Tensor, Tensor]:
    """Returns the best objective ``(B)`` and the least upper bound ``(B)`` that a long solve in float64 finds.

    It reweights ``iterations`` times at each of three falling smoothings. The optimum lies between the two.
    """
    problem, scale = pose(w.double(), g.double(), manifold, "eigh")
    dual = torch.zeros_like(problem.c)
    objectives = []
    bounds = [singular_values(problem.g + 2 * problem.w @ at).sum(-1) for at in (dual, problem.lifting)]
    for smoothing in (1e-5, 1e-7, 1e-9):
        problem = replace(problem, smoothing=smoothing)
        for _ in range(iterations):
            dual = dual + RELAXATION[1] * problem.step(problem.reweigh(dual), dual)
        objectives.append(problem.answer(dual, None).objective)
        bounds.append(singular_values(problem.g + 2 * problem.w @ dual).sum(-1))
    return torch.stack(objectives).amax(0) * scale, torch.stack(bounds).amin(0) * scale
