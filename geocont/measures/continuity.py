"""Continuity of matrices through depth: how the leading singular directions of adjacent layers line up.

Every function takes a stack of the matrices of one projection, ``(L, m, n)`` = (layers, out, in), and returns one value
for each adjacent pair, ``(L - 1,)``, or for each layer, ``(L,)``. A value that does not exist (a zero or non-finite
matrix, the trace-removed Gram matrix of an orthonormal side) is NaN: :func:`summarise` leaves it out and counts it.

Sources: ``v1``, ``u1``, ``sigma2`` follow arXiv 2605.04971. Where that paper leaves a formula open (the pairing of
``sigma2``, the removal of the trace in ``gram``, ``topk``, ``gap``) the definition is this project's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from geocont.linalg import LeadingSubspace, full_precision, leading_subspace, svd_by_gram

#: Directions compared by ``topk``.
TOP_K = 5
#: A leading direction counts as defined from this ratio of the two largest singular values on.
DEFINED_GAP = 1.02
#: ``gap`` of a matrix of rank one, whose second singular value is zero.
LARGEST_GAP = 1e6

#: Share of sum s_i^2 that ``sigma2`` may leave out: its error is below that.
NEGLIGIBLE = 1e-4
#: Share of sum s_i^2 in the leading triplets from which a matrix may be of low rank, as gradients of small batches are.
CONCENTRATED = 0.8


@dataclass(frozen=True)
class LightTable:
    """The measures that are cheap enough for every firing.

    Attributes:
        values: Measure -> values: ``(L - 1,)`` for pairs, ``(L,)`` for ``gap``.
        subspace: Leading singular values and vectors of each layer; its ``start`` warms the next call.
    """

    values: dict[str, Tensor]
    subspace: LeadingSubspace


@full_precision()
def light_table(w: Tensor, start: Tensor | None = None) -> LightTable:
    """Computes ``v1 u1 topk_in topk_out cosine gap defined`` of a stack of matrices ``(L, m, n)``.

    Args:
        w: The matrices of one projection, in order of depth.
        start: ``subspace.start`` of an earlier call on nearly the same matrices, which makes this one cheaper.
    """
    w = _at_least_float32(w)
    subspace = leading_subspace(w, TOP_K + 1, start=start)
    bad = ~(subspace.s[..., 0] > 0)  # zero or non-finite
    gap = singular_gap(subspace.s).masked_fill(bad, math.nan)
    k = min(TOP_K, subspace.s.shape[-1])
    v, u = subspace.v, subspace.u
    values = {
        "v1": alignment(v[:-1, :, 0], v[1:, :, 0]),
        "u1": alignment(u[:-1, :, 0], u[1:, :, 0]),
        "topk_in": subspace_overlap(v[:-1, :, :k], v[1:, :, :k]),
        "topk_out": subspace_overlap(u[:-1, :, :k], u[1:, :, :k]),
        "cosine": cosine(w, subspace.s[..., 0]),
        "defined": ((gap[:-1] >= DEFINED_GAP) & (gap[1:] >= DEFINED_GAP)).to(gap.dtype),
    }
    bad_pair = bad[:-1] | bad[1:]
    values = {name: value.masked_fill(bad_pair, math.nan) for name, value in values.items()}
    values["gap"] = gap
    return LightTable(values, subspace)


@full_precision()
def full_table(w: Tensor, subspace: LeadingSubspace | None = None) -> dict[str, Tensor]:
    """Computes ``sigma2`` and ``gram`` on both sides, ``(L - 1,)`` each: all singular vectors, hence the dear table.

    Args:
        w: The matrices of one projection, in order of depth, ``(L, m, n)``.
        subspace: Their leading triplets, used for ``sigma2`` in place of all where what they leave out weighs less than
            ``NEGLIGIBLE``: the gradients of small batches have few directions.
    """
    w = _at_least_float32(w)
    norms = torch.linalg.vector_norm(w, dim=(-2, -1), dtype=torch.float64)  # where no square vanishes
    least = 0.0 if subspace is None else float((subspace.s / norms[:, None]).square().sum(-1).min())  # NaN if any is
    if subspace is not None and least > 1 - NEGLIGIBLE:
        u, s, v = subspace.u, subspace.s, subspace.v
    else:
        u, s, v = svd_by_gram(w, low_rank=least > CONCENTRATED)
    return {
        "sigma2_in": sigma2(s, v),
        "sigma2_out": sigma2(s, u),
        "gram_in": gram_cosine(w),
        "gram_out": gram_cosine(w.mT),
    }


def alignment(a: Tensor, b: Tensor) -> Tensor:
    """abs <a, b> of unit vectors ``(..., d)``: signs of singular vectors are arbitrary."""
    return (a * b).sum(-1).abs()


def subspace_overlap(a: Tensor, b: Tensor) -> Tensor:
    """Squared overlap of two subspaces, ||A^T B||_F^2 / k in [0, 1], from orthonormal bases ``(..., d, k)``.

    Zero columns, of matrices whose rank is below k, do not count: k is then the smaller rank.
    """
    ranks = torch.minimum(*(basis.square().sum(-2).round().sum(-1) for basis in (a, b)))
    return (a.mT @ b).square().sum((-2, -1)) / ranks


def cosine(w: Tensor, scale: Tensor) -> Tensor:
    """<W, W'>_F / (||W||_F ||W'||_F) of adjacent layers ``(L, m, n)`` -> ``(L - 1,)``; NaN where one of them is zero.

    ``scale`` is any size of each matrix, ``(L,)``: the squares of 1e-25 vanish in float32.
    """
    flat = w.flatten(1)  # (L, m n)
    if bool(((scale < 1e-12) | (scale > 1e12)).any()):
        flat = flat / scale[:, None]
    norms = torch.linalg.vector_norm(flat, dim=1)
    return torch.linalg.vecdot(flat[:-1], flat[1:]) / (norms[:-1] * norms[1:])


def singular_gap(s: Tensor) -> Tensor:
    """s1 / s2 of singular values ``(..., k)`` in descending order, at most ``LARGEST_GAP`` (rank one, one column)."""
    if s.shape[-1] < 2:
        return torch.full_like(s[..., 0], LARGEST_GAP)
    return (s[..., 0] / s[..., 1]).clamp(max=LARGEST_GAP)


def sigma2(s: Tensor, vectors: Tensor) -> Tensor:
    """sum_i s_i^2 abs <v_i, v_i'> / sum_i s_i^2 of adjacent layers, vectors of the same index paired.

    Args:
        s: ``(L, r)``, descending.
        vectors: ``(L, d, r)``, the singular vectors of one side.

    The weights are those of the lower layer of the pair; an exchange of two indices costs, as the paper weights it.
    """
    weights = (s[:-1] / s[:-1, :1]).square()
    pairs = (vectors[:-1] * vectors[1:]).sum(-2).abs()
    value = (weights * pairs).sum(-1) / weights.sum(-1)
    return value.masked_fill(~(s[1:, 0] > 0), math.nan)


@full_precision()
def gram_cosine(w: Tensor) -> Tensor:
    """Trace-removed cosine of the Gram matrices W^T W of adjacent layers ``(L, m, n)`` -> ``(L - 1,)``.

    Needs no singular vectors. Without its trace the Gram matrix of a random matrix is as far from its neighbour's as
    chance has it (0), with it about 0.5. NaN where nothing is left beside the trace: the columns are orthonormal.
    """
    w = _normalised(_at_least_float32(w))
    m, n = w.shape[-2:]
    if n <= m:
        gram = w.mT @ w
        diagonal = gram.diagonal(dim1=-2, dim2=-1)
        diagonal -= diagonal.mean(-1, keepdim=True)
        norms = gram.square().sum((-2, -1))
        inner = (gram[:-1] * gram[1:]).sum((-2, -1))
    else:  # the same numbers without an n x n matrix: <W^T W, W'^T W'> = ||W W'^T||_F^2, and both traces are 1
        norms = (w @ w.mT).square().sum((-2, -1)) - 1 / n
        inner = (w[:-1] @ w[1:].mT).square().sum((-2, -1)) - 1 / n
    # ||W^T W||_F^2 >= 1 / n here: what is left below 1e-10 of that is rounding.
    nothing = norms < 1e-10 / n
    value = inner / (norms[:-1] * norms[1:]).sqrt()
    return value.masked_fill(nothing[:-1] | nothing[1:], math.nan)


def _at_least_float32(w: Tensor) -> Tensor:
    return w.float() if w.dtype in (torch.bfloat16, torch.float16) else w


def _normalised(w: Tensor) -> Tensor:
    """w / ||w||_F for each matrix; brought near 1 first where squares would vanish or overflow."""
    size = w.abs().amax((-2, -1), keepdim=True)
    if bool(((size < 1e-12) | (size > 1e12)).any()):
        w = w / size
    return w / torch.linalg.vector_norm(w, dim=(-2, -1), keepdim=True)


def relative_norm(updates: Sequence[Tensor], initial: Sequence[Tensor]) -> Tensor:
    """||W - W0||_F / ||W0||_F of updates W - W0 and initial matrices W0, one for each; NaN where W0 is zero."""
    norms = torch.stack(torch._foreach_norm(list(updates)))
    scale = torch.stack(torch._foreach_norm(list(initial)))
    return (norms / scale).masked_fill(scale == 0, math.nan)


def leading_alignment(a: Tensor, b: Tensor) -> Tensor:
    """abs <v1(A), v1(B)> of two stacks ``(L, m, n)`` -> ``(L,)``; NaN where one is zero or not finite."""
    one, other = leading_subspace(a, 1), leading_subspace(b, 1)
    bad = ~(one.s[..., 0] > 0) | ~(other.s[..., 0] > 0)
    return alignment(one.v[..., 0], other.v[..., 0]).masked_fill(bad, math.nan)


def stacks_of_one_shape(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Returns neighbouring matrices of one shape as stacks ``(L, m, n)``: one stack unless layers differ."""
    return [torch.stack(list(run)) for _, run in groupby(matrices, key=lambda matrix: matrix.shape)]


def chance(measure: str, dimension: int) -> float | None:
    """Expected value of a measure for unrelated random matrices; None where there is no such level (``gap``).

    sqrt(2 / (pi d)) for ``v1 u1 sigma2`` (mean of abs <a, b> of random unit vectors), k / d for ``topk``, else 0.
    """
    name = measure.split("_")[0]
    if name in ("v1", "u1", "sigma2"):
        return math.sqrt(2 / (math.pi * dimension))
    if name == "topk":
        return min(TOP_K, dimension) / dimension
    return 0.0 if name in ("cosine", "gram") else None


def chance_deviation(dimension: int) -> float:
    """Standard deviation of abs <a, b> of random unit vectors, sqrt((1 - 2 / pi) / d), about the level of ``v1 u1``."""
    return math.sqrt((1 - 2 / math.pi) / dimension)


def summarise(values: Mapping[str, Tensor]) -> tuple[dict[str, float], int]:
    """Reduces each measure to its mean over the pairs (or layers) that have a value.

    Returns:
        The means, without the measures that have no value at all, and the number of values that were left out.
    """
    if not values:
        return {}, 0
    counts = [value.numel() for value in values.values()]
    flat = torch.cat([value.flatten() for value in values.values()]).tolist()  # one transfer from the device
    means, skipped, position = {}, 0, 0
    for name, count in zip(values, counts, strict=True):
        finite = [x for x in flat[position : position + count] if math.isfinite(x)]
        skipped += count - len(finite)
        position += count
        if finite:
            means[name] = sum(finite) / len(finite)
    return means, skipped
