"""One matrix, and two that are neighbours: every measure of an analysis, from the two matrices at hand.

The formulas are those of :mod:`geocont.measures.continuity`. What differs is how much of a spectrum there is: all of it
for small matrices, leading triplets and random probes (:mod:`geocont.pretrained.estimates`) for large ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from geocont.linalg import leading_subspace, svd_by_gram
from geocont.linalg.polar import eigh
from geocont.measures.continuity import (
    DEFINED_GAP,
    TOP_K,
    alignment,
    gram_cosine,
    sigma2,
    singular_gap,
    subspace_overlap,
)
from geocont.pretrained.estimates import Side, effective_rank_estimate, gram_estimate, side_of, sigma2_estimate

#: Smaller side up to which all singular triplets are computed, for all measures.
EXACT_SIDE = 1024
#: Smaller side up to which leading ones come from the Gram matrix, which is faster than iterating there.
DENSE_SIDE = 256
#: Leading singular values that are reported, and triplets that estimates hold exactly.
LEADING = 32
#: Numbers multiplied at a time where two matrices meet.
CHUNK = 1 << 22
#: Sizes outside of these are divided out, since their squares vanish or overflow.
SMALLEST, LARGEST = 1e-12, 1e12

#: Measures of a pair, in the order of a row.
LIGHT = ("v1", "u1", "topk_in", "topk_out", "cosine")
FULL = ("sigma2_in", "sigma2_out", "gram_in", "gram_out")


@dataclass
class Layer:
    """What is kept of a matrix until its neighbour has been compared with it.

    Attributes:
        w: The matrix, ``(m, n)``; None where it has no directions.
        problem: Why it has none: ``not finite``, ``zero``.
        u: Leading, or all, left singular vectors ``(m, k)``.
        s: Singular values ``(k,)``.
        v: Right singular vectors ``(n, k)``.
        norm: ||W||_F.
        complete: Whether all triplets are there.
        certificate: Estimated sine of the angle by which the leading vectors may be off; 0 where exact.
        start: Block from which a neighbour's iteration starts.
        sides: ``in`` and ``out``, for estimates.
        spectrum: Spectral measures.
    """

    w: Tensor | None
    problem: str | None = None
    u: Tensor = field(default_factory=lambda: torch.empty(0, 0))
    s: Tensor = field(default_factory=lambda: torch.empty(0))
    v: Tensor = field(default_factory=lambda: torch.empty(0, 0))
    norm: float = 0.0
    complete: bool = False
    certificate: float = 0.0
    start: Tensor | None = None
    sides: dict[str, Side] = field(default_factory=dict)
    spectrum: dict[str, object] = field(default_factory=dict)


@torch.no_grad()
def analyse_matrix(
    w: Tensor, reads: bool, light: bool, start: Tensor | None = None, exact_side: int = EXACT_SIDE
) -> Layer:
    """Finds leading directions and spectrum of a matrix.

    Args:
        w: ``(m, n)``, out x in, float32 or float64.
        reads: Whether it reads from the residual stream: then a square one is iterated on its input side, on which
            neighbours are alike and a warm start helps.
        light: Leading directions only.
        start: ``start`` of a neighbour.
        exact_side: Smaller side up to which all triplets are computed.
    """
    norm, factor = _norm(w), 1.0
    if not SMALLEST <= norm <= LARGEST:
        size = float(w.abs().max()) if w.numel() else 0.0
        if not math.isfinite(size) or size == 0:
            return Layer(None, "zero" if size == 0 else "not finite")
        w, factor = w / size, size
        norm = _norm(w)
    smaller = min(w.shape)
    if not light and smaller <= exact_side:
        layer = Layer(w, None, *svd_by_gram(w), complete=True)
    elif light and smaller <= DENSE_SIDE:
        layer = Layer(w, None, *_leading_by_gram(w, TOP_K + 1))
    else:
        layer = _leading(w, reads, TOP_K + 1 if light else LEADING, start)
    layer.norm = norm
    s = layer.s
    layer.spectrum = {
        "sigma_max": float(s[0]) * factor,
        "stable_rank": (layer.norm / float(s[0])) ** 2,
        "gap": float(singular_gap(s)),
        "frobenius": layer.norm * factor,
        "singular_values": [float(value) * factor for value in s[:LEADING]],
        "certificate": layer.certificate,
    }
    if not light:
        layer.spectrum |= _whole_spectrum(layer, w)
    return layer


def _norm(w: Tensor) -> float:
    """||W||_F, by rows or columns as they lie in memory, then in float64; NaN or infinite if w is not finite."""
    return float(torch.linalg.vector_norm(w, dim=1 if w.stride(1) == 1 else 0).double().norm())


def _leading(w: Tensor, reads: bool, k: int, start: Tensor | None) -> Layer:
    turned = reads and w.shape[0] == w.shape[1]
    rows = w.mT if turned else w
    block = (min(w.shape), min(min(w.shape), k + 2))  # that of leading_subspace for this k
    found = leading_subspace(rows, k, start=start if start is not None and start.shape == block else None)
    u, v = (found.v, found.u) if turned else (found.u, found.v)
    return Layer(w, None, u, found.s, v, certificate=float(found.residual), start=found.start)


def _leading_by_gram(w: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The k leading triplets through the smaller Gram matrix: for few rows faster than iterating."""
    rows = w if w.shape[0] <= w.shape[1] else w.mT
    left = eigh(rows @ rows.mT)[1][:, -k:].flip(1)
    right = rows.mT @ left
    s = torch.linalg.vector_norm(right, dim=0)
    s, order = s.sort(descending=True)  # rounding exchanges those that are nearly equal
    left, right = left[:, order], right[:, order]
    kept = s > len(rows) * torch.finfo(s.dtype).eps * s[0]  # beyond the numerical rank there are no directions
    left, right = left * kept, torch.where(kept, right / s, 0.0)
    return (left, s, right) if rows is w else (right, s, left)


def _whole_spectrum(layer: Layer, w: Tensor) -> dict[str, object]:
    s = layer.s
    if layer.complete:
        share = (s / s.sum()).double()
        entropy = -torch.special.xlogy(share, share).sum()
        return {"effective_rank": float(entropy.exp()), "effective_rank_error": 0.0}
    layer.sides = {
        "in": side_of(w, layer.v, s, layer.norm),
        "out": side_of(w.mT, layer.u, s, layer.norm),
    }
    rank, error = effective_rank_estimate(w, s, layer.v, layer.u)
    return {"effective_rank": rank, "effective_rank_error": error}


@torch.no_grad()
def compare(a: Layer, b: Layer, light: bool) -> dict[str, float | bool | None]:
    """Computes the measures of two neighbours; None where a measure has no value.

    Sides of different sizes have no measures; ``sigma2`` and ``gram`` come with ``..._error``, 0 where exact.
    """
    wanted = LIGHT if light else (*LIGHT, *FULL, *(f"{name}_error" for name in FULL))
    values: dict[str, float | bool | None] = dict.fromkeys(wanted)
    if a.w is None or b.w is None:
        return values | {"gap": None, "gap_next": None, "defined": False}
    gap, following = float(singular_gap(a.s)), float(singular_gap(b.s))
    k = min(TOP_K, len(a.s), len(b.s))
    for side, one, other in (("in", a.v, b.v), ("out", a.u, b.u)):
        if len(one) != len(other):
            continue
        values["v1" if side == "in" else "u1"] = float(alignment(one[:, 0], other[:, 0]))
        values[f"topk_{side}"] = float(subspace_overlap(one[:, :k], other[:, :k]))
        if not light:
            found = _exact(side, a, b) if a.complete and b.complete else _estimated(side, a, b)
            for name, (value, error) in found.items():
                finite = math.isfinite(value)
                values[f"{name}_{side}"] = value if finite else None
                values[f"{name}_{side}_error"] = error if finite else None
    if a.w.shape == b.w.shape:
        values["cosine"] = inner_product(a.w, b.w) / (a.norm * b.norm)
    defined = gap >= DEFINED_GAP and following >= DEFINED_GAP
    return values | {"gap": gap, "gap_next": following, "defined": defined}


def _exact(side: str, a: Layer, b: Layer) -> dict[str, tuple[float, float]]:
    assert a.w is not None
    assert b.w is not None
    count = min(len(a.s), len(b.s))
    one, other = (a.v, b.v) if side == "in" else (a.u, b.u)
    pairs = torch.stack([one[:, :count], other[:, :count]])
    weighted = sigma2(torch.stack([a.s[:count], b.s[:count]]), pairs)
    if a.w.shape == b.w.shape:
        both = torch.stack([a.w, b.w])
        gram = float(gram_cosine(both if side == "in" else both.mT))
    else:
        gram = math.nan
    return {"sigma2": (float(weighted), 0.0), "gram": (gram, 0.0)}


def _estimated(side: str, a: Layer, b: Layer) -> dict[str, tuple[float, float]]:
    assert a.w is not None
    assert b.w is not None
    one, other = (a.v, b.v) if side == "in" else (a.u, b.u)
    found = {"sigma2": sigma2_estimate(a.s, one, other, a.norm), "gram": (math.nan, math.nan)}
    if side in a.sides and side in b.sides:
        weights_a, weights_b = (a.s / a.norm).square(), (b.s / b.norm).square()
        energy_ab = _energy(b.w if side == "in" else b.w.mT, one, b.norm)
        energy_ba = _energy(a.w if side == "in" else a.w.mT, other, a.norm)
        found["gram"] = gram_estimate(a.sides[side], b.sides[side], weights_a, weights_b, energy_ab, energy_ba)
    return found


def _energy(w: Tensor, vectors: Tensor, norm: float) -> Tensor:
    """||W v||^2 / ||W||_F^2 for the columns of ``vectors`` ``(n, k)`` -> ``(k,)``."""
    return (w @ vectors / norm).square().sum(0)


def inner_product(a: Tensor, b: Tensor) -> float:
    """<A, B>_F of matrices of one shape, a few rows (or columns, as they lie in memory) at a time."""
    a, b = (a, b) if a.stride(1) == 1 else (a.mT, b.mT)
    step = max(1, CHUNK // a.shape[1])
    return sum(float(torch.dot(a[i : i + step].flatten(), b[i : i + step].flatten())) for i in range(0, len(a), step))
