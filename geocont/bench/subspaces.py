"""Leading singular subspaces of matrices of GPT-2 small's size, against the Gram matrix plus ``eigh``."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import Tensor

from geocont.bench.timing import interleave, median_ratio
from geocont.linalg import LeadingSubspace, leading_subspace

SHAPES = ((768, 3072), (3072, 768))
GAP = 1.02


def spectrum(name: str, count: int, generator: torch.Generator) -> Tensor:
    """Returns descending singular values with s1 / s2 = 1.02.

    ``power_half`` and ``power_one`` fall like i^-0.5 and i^-1; ``spikes`` are eight values 1.02 apart over a flat bulk
    at half their height; ``gaussian`` are those of a Gaussian matrix, the first one raised.
    """
    index = torch.arange(1, count + 1, dtype=torch.float64)
    if name == "gaussian":
        s = torch.linalg.svdvals(torch.randn(count, 4 * count, generator=generator, dtype=torch.float64))
    elif name == "spikes":
        s = torch.where(index <= 8, GAP ** -(index - 1), 0.4 + 0.05 * torch.linspace(1, 0, count, dtype=torch.float64))
    else:
        s = index ** (-0.5 if name == "power_half" else -1.0)
    s[0] = GAP * s[1]
    return s


def measure_subspaces(repeats: int) -> list[dict[str, Any]]:
    """Returns rows ``name shape state ms dense_ms speedup cosine_error``.

    ``cold`` starts from random vectors, ``warm`` from those of the same matrix before 1 % of Gaussian noise (relative
    Frobenius norm) was added; ``cosine_error`` is the larger 1 - abs cos of v1 and u1 to the float64 SVD.
    """
    generator = torch.Generator().manual_seed(0)
    rows = []
    for shape in SHAPES:
        for name in ("power_half", "power_one", "spikes", "gaussian"):
            w = _matrix(spectrum(name, min(shape), generator), shape, generator)
            noise = torch.randn(shape, generator=generator)
            moved = w + 0.01 * noise * (w.norm() / noise.norm())
            rows += _compare(name, w, moved, repeats)
    return rows


def _matrix(s: Tensor, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    u, v = (torch.linalg.qr(torch.randn(n, len(s), generator=generator, dtype=torch.float64))[0] for n in shape)
    return ((u * s) @ v.mT).float()


def _compare(name: str, w: Tensor, moved: Tensor, repeats: int) -> list[dict[str, Any]]:
    start = leading_subspace(w).start
    smaller = w if w.shape[0] <= w.shape[1] else w.mT
    arms = {
        "cold": lambda: leading_subspace(w),
        "warm": lambda: leading_subspace(moved, start=start),
        "dense": lambda: torch.linalg.eigh(smaller @ smaller.mT),
    }
    interleave(arms, 1)  # warms caches and libraries up
    seconds = interleave(arms, repeats)
    errors = {"cold": _error(leading_subspace(w), w), "warm": _error(leading_subspace(moved, start=start), moved)}
    return [
        {
            "name": name,
            "shape": "x".join(map(str, w.shape)),
            "state": state,
            "ms": 1e3 * statistics.median(seconds[state]),
            "dense_ms": 1e3 * statistics.median(seconds["dense"]),
            "speedup": 1 / median_ratio(seconds[state], seconds["dense"]),
            "cosine_error": error,
        }
        for state, error in errors.items()
    ]


def _error(found: LeadingSubspace, w: Tensor) -> float:
    u, _, vh = torch.linalg.svd(w.double(), full_matrices=False)
    cosines = ((found.u[:, 0].double() @ u[:, 0]).abs(), (found.v[:, 0].double() @ vh[0]).abs())
    return float(1 - min(cosines))
