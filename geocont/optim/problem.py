"""The n x n problem in which a step on a manifold is solved, whatever the number of rows of W.

See :mod:`geocont.optim.solvers` for the step itself; W, G, A, L, P are those of its docstring, C = W^T G, D = W^T W,
X = G + 2 W L, S = X^T X.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from geocont.linalg.polar import Root, eigh, inverse_sqrt, inverse_sqrt_of_eigenvalues, msign
from geocont.manifolds import Manifold, Oblique, Stiefel

#: Added to the eigenvalues of X^T X, as a share of the largest: what makes the nuclear norm smooth.
SMOOTHING = 3e-6
#: Conjugate gradients in one iteration of ``reweighted``; with four other products they make twelve.
CONJUGATE_GRADIENTS = 8
#: What becomes of singular values above one, in turn: s^(1 - power), so they are cut to one, then inverted.
INVERSIONS = (1, 2)
#: Newton-Schulz steps on the closed form: smoothing leaves small singular values short of one.
POLISHING = 2
#: Tangent parts below so many units of rounding are none.
ROUNDING = 8


@dataclass(frozen=True)
class Solution:
    """What a solver returns for a batch of B matrices."""

    update: Tensor
    """(B, m, n) A; zero for a zero G"""
    dual: Tensor | None
    """(B, n, n) L, of the scale of G, from which the bound comes; None where there is no constraint"""
    carry: Tensor | None
    """(B, n, n) what the next call may start from, without a scale; None where there is nothing to keep"""
    tangent_residual: Tensor
    """(B) ||P(W^T A + A^T W)||_F / (||W||_F ||A||_F) of the solver's own A, before it is projected"""
    objective: Tensor
    """(B) <G, A>"""
    bound: Tensor
    """(B) upper bound of the optimum from the dual variable, to the rounding of float32"""

    @property
    def certified_ratio(self) -> Tensor:
        """(B) share of the optimum that A certainly reaches; 1 for a zero G."""
        nought = self.bound <= 0
        return torch.where(nought, 1, self.objective / self.bound.masked_fill(nought, 1))


@dataclass(frozen=True)
class Weights:
    """Q = (X^T X + e I)^(-1/2) at some L, from its eigenvectors or from products."""

    bound: Tensor  # (B) ||X||_*
    by_products: Tensor | None = None  # Q, or:
    values: Tensor | None = None  # (B, n) its eigenvalues
    vectors: Tensor | None = None

    @cached_property
    def q(self) -> Tensor:
        """(B, n, n), made when it is first asked for: a step on Stiefel needs the eigenvectors only."""
        if self.values is None or self.vectors is None:
            assert self.by_products is not None
            return self.by_products
        return (self.vectors * self.values[..., None, :]) @ self.vectors.mT


@dataclass(frozen=True)
class Problem:
    """W, the tangent part of G with norm one, and the n x n matrices that stand for them.

    Only the tangent part counts, <G, A> being the same for it. Near an optimum it is small beside the rest, in whose
    rounding it would drown.
    """

    w: Tensor
    g: Tensor
    manifold: Manifold
    root: Root
    d: Tensor  # W^T W, or its diagonal (B, n)
    c: Tensor  # W^T G
    gram: Tensor  # G^T G
    lifting: Tensor  # the L with which G + 2 W L is the whole of G again
    share: Tensor  # (B, 1, 1) norm of the tangent part relative to that of the whole
    smoothing: float = SMOOTHING

    def _times_d(self, x: Tensor) -> Tensor:
        return self.d @ x if self.d.ndim == x.ndim else self.d[..., :, None] * x

    def reweigh(self, dual: Tensor) -> Weights:
        """Returns Q at L = ``dual``."""
        cross = self.c.mT @ dual
        square = 4 * (dual @ self._times_d(dual))
        terms = torch.linalg.matrix_norm(self.gram, keepdim=True) + torch.linalg.matrix_norm(square, keepdim=True)
        rounding = 2 * torch.finfo(terms.dtype).eps * terms
        return weigh(self.gram + 2 * (cross + cross.mT) + square, self.root, self.smoothing, rounding)

    def step(self, weights: Weights, dual: Tensor) -> Tensor:
        """Returns what takes ``dual`` to the minimiser of the majorant."""
        inner = self.c + 2 * self._times_d(dual)
        if isinstance(self.manifold, Oblique):
            system = self.d * weights.q
            system = system + torch.diag_embed((system.diagonal(dim1=-2, dim2=-1) == 0).to(system.dtype))  # of a zero G
            right = (inner * weights.q).sum(-1, keepdim=True)  # diag(B Q), Q being symmetric
            return torch.diag_embed(-torch.linalg.solve(system, right).squeeze(-1) / 2)
        if isinstance(self.manifold, Stiefel) and weights.vectors is not None and weights.values is not None:
            values, vectors = weights.values, weights.vectors
            right = (vectors.mT @ (inner @ vectors)) * values[..., None, :]
            sums = values[..., :, None] + values[..., None, :]
            return vectors @ (-(right + right.mT) / (2 * sums).clamp_min(_tiny(sums))) @ vectors.mT
        inner = inner @ weights.q
        return self._conjugate_gradients(weights.q, -self.manifold.projector(inner + inner.mT))

    def _conjugate_gradients(self, q: Tensor, right: Tensor) -> Tensor:
        """Solves P[2 D Z Q + 2 Q Z D] = right, preconditioned by the operator's diagonal for a diagonal D."""

        def operator(z: Tensor) -> Tensor:
            product = 2 * self._times_d(z) @ q
            return self.manifold.projector(product + product.mT)

        d = self.d.diagonal(dim1=-2, dim2=-1) if self.d.ndim == q.ndim else self.d
        diagonal = 2 * d[..., :, None] * q.diagonal(dim1=-2, dim2=-1)[..., None, :]
        diagonal = (diagonal + diagonal.mT).clamp_min(_tiny(q))
        solution = torch.zeros_like(right)
        conditioned = right / diagonal
        direction, energy = conditioned, _inner(right, conditioned)
        for _ in range(CONJUGATE_GRADIENTS):
            image = operator(direction)
            length = energy / _inner(direction, image).clamp_min(_tiny(q))
            solution = solution + length * direction
            right = right - length * image
            conditioned = right / diagonal
            previous, energy = energy, _inner(right, conditioned)
            direction = conditioned + energy / previous.clamp_min(_tiny(q)) * direction
        return solution

    def answer(self, dual: Tensor, carry: Tensor | None) -> Solution:
        """Returns the feasible A that belongs to ``dual``, as G Y + W Z until the very end."""
        weights = self.reweigh(dual)
        y, z = weights.q, 2 * dual @ weights.q
        inner = self.c @ y + self._times_d(z)  # W^T A
        squares = y @ (self.gram @ y + self.c.mT @ z) + z.mT @ inner  # A^T A
        residual = self.tangency(inner, squares)
        for number, power in enumerate(INVERSIONS, 1):
            m = self.manifold.multiplier(self.d, inner)
            cross = inner.mT @ m  # m is symmetric
            squares = squares - cross - cross.mT + m @ self._times_d(m)
            inner, z = inner - self._times_d(m), z - m
            shrunk = _shrinking_large(squares, power, self.root)
            y, z = y @ shrunk, z @ shrunk
            if number < len(INVERSIONS):
                inner, squares = inner @ shrunk, shrunk @ squares @ shrunk
        update = self.manifold.proju(self.w, self.g @ y + self.w @ z)  # of A itself, so that it is exact
        return self.solution(shortened(update, self.root), dual, carry, residual, weights.bound)

    def closed_form(self) -> Solution:
        """Returns the optimum on square Stiefel matrices."""
        skew = (self.c - self.c.mT) / 2
        weights = weigh(skew.mT @ skew, self.root)
        rotation = skew @ weights.q
        for _ in range(POLISHING):
            rotation = 1.5 * rotation - 0.5 * rotation @ (rotation.mT @ rotation)
        update = self.w @ ((rotation - rotation.mT) / 2)
        return self.solution(update, torch.zeros_like(self.c), None, torch.zeros_like(weights.bound), weights.bound)

    def solution(self, update: Tensor, dual: Tensor, carry: Tensor | None, residual: Tensor, bound: Tensor) -> Solution:
        """Returns an answer of this problem as one for the whole of G."""
        return Solution(update, dual - self.lifting, carry, residual, (self.g * update).sum((-2, -1)), bound)

    def tangency(self, inner: Tensor, squares: Tensor) -> Tensor:
        """Returns the relative tangent residual of A from W^T A and A^T A."""
        off = torch.linalg.matrix_norm(self.manifold.projector(inner + inner.mT))
        trace = squares.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(0)
        norms = torch.linalg.matrix_norm(self.w) * trace.sqrt()
        return torch.where(norms > 0, off / torch.where(norms > 0, norms, 1), 0)


def unconstrained(g: Tensor, root: Root) -> Solution:
    """Returns A = msign(G) of G of any scale."""
    g, norm = _normalised(g)
    weights = weigh(g.mT @ g, root)
    update = g @ weights.q
    objective = (g * update).sum((-2, -1))
    norm = norm[..., 0, 0]
    return Solution(update, None, None, torch.zeros_like(objective), objective * norm, weights.bound * norm)


def pose(w: Tensor, g: Tensor, manifold: Manifold, root: Root) -> tuple[Problem, Tensor]:
    """Returns the problem, and by how much ``(B)`` its G is smaller than that of the user."""
    g, norm = _normalised(g)
    d = manifold.metric(w)
    c = w.mT @ g
    m = manifold.multiplier(d, c)
    g = g - w @ m
    share = torch.linalg.matrix_norm(g, keepdim=True)
    share = torch.where(share > ROUNDING * torch.finfo(g.dtype).eps, share, 0)  # else nothing of G is tangent
    unit = torch.where(share == 0, 1, share)
    g = torch.where(share == 0, 0, g / unit)
    c = c - m * d[..., :, None] if d.ndim < m.ndim else c - d @ m
    problem = Problem(w, g, manifold, root, d, torch.where(share == 0, 0, c / unit), g.mT @ g, m / 2 / unit, share)
    return problem, (norm * unit)[..., 0, 0]


def _normalised(g: Tensor) -> tuple[Tensor, Tensor]:
    """Returns G with norm one, zero if it is zero, and its norm ``(B, 1, 1)``."""
    largest = g.abs().amax((-2, -1), keepdim=True)  # first, as squares of 1e-20 would vanish
    g = g / torch.where(largest == 0, 1, largest)
    norm = torch.linalg.matrix_norm(g, keepdim=True)
    return g / torch.where(norm == 0, 1, norm), largest * norm


def scaled(solution: Solution, scale: Tensor) -> Solution:
    """Returns the solution of a problem with G of norm one, for G as it is."""
    dual = None if solution.dual is None else solution.dual * scale[..., None, None]
    return replace(solution, dual=dual, objective=solution.objective * scale, bound=solution.bound * scale)


def weigh(s: Tensor, root: Root, smoothing: float = SMOOTHING, rounding: Tensor | float = 0.0) -> Weights:
    """Returns the weights of S, whose eigenvalues may be negative by ``rounding``, which products only cannot take."""
    s = (s + s.mT) / 2
    if root != "eigh":
        largest = torch.linalg.matrix_norm(s @ s, keepdim=True).sqrt()  # within n^(1/4)
        s = s + (smoothing * largest + rounding) * torch.eye(s.shape[-1], dtype=s.dtype, device=s.device)
        q = inverse_sqrt(s, root)
        return Weights((s * q).sum((-2, -1)), by_products=q)
    values, vectors = eigh(s)
    values = values.clamp_min(0)
    roots = inverse_sqrt_of_eigenvalues(values + smoothing * values[..., -1:])
    return Weights(values.sqrt().sum(-1), values=roots, vectors=vectors)


def _shrinking_large(squares: Tensor, power: int, root: Root) -> Tensor:
    """Returns max(A^T A, I)^(-power / 2): A times that has s^(1 - power) for its singular values s > 1."""
    squares = (squares + squares.mT) / 2
    if root == "eigh":
        values, vectors = eigh(squares)
        return (vectors * values.clamp_min(1).pow(-power / 2)[..., None, :]) @ vectors.mT
    identity = torch.eye(squares.shape[-1], dtype=squares.dtype, device=squares.device)
    excess = squares - identity
    excess = (excess + msign(excess) @ excess) / 2  # its positive part
    larger = identity + (excess + excess.mT) / 2
    return torch.linalg.inv(larger) if power == 2 else inverse_sqrt(larger, root)


def shortened(update: Tensor, root: Root) -> Tensor:
    """Returns A / max(1, ||A||_2)."""
    squares = update.mT @ update
    if root == "eigh":
        largest = torch.linalg.eigvalsh(squares)[..., -1]
    else:  # tr(S^p)^(1/p) from above: by n^(1/p) at most, 1.0005 for p = 2^14 and n = 4096
        largest = torch.ones_like(squares[..., 0, 0])
        power = 1.0
        for _ in range(14):
            norm = torch.linalg.matrix_norm(squares)
            largest = largest * norm.pow(power)
            squares = squares / torch.where(norm == 0, 1, norm)[..., None, None]
            squares, power = squares @ squares, power / 2
        largest = largest * squares.diagonal(dim1=-2, dim2=-1).sum(-1).pow(power)
    return update / largest.clamp_min(1).sqrt()[..., None, None]


def singular_values(x: Tensor) -> Tensor:
    """Returns singular values ``(B, n)`` of float64 matrices; through X^T X, as LAPACK's SVD fails on some of them."""
    return torch.linalg.eigvalsh(x.mT @ x).clamp_min(0).sqrt()


def _inner(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum((-2, -1), keepdim=True)


def _tiny(x: Tensor) -> float:
    return torch.finfo(x.dtype).tiny
