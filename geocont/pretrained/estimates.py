"""Measures of the whole spectrum of large matrices, from random probes, with error bars.

W = H + R: H holds the leading k singular triplets, exact; R is the rest, seen through ``PROBES`` random vectors that
all matrices of a shape share. What H explains has no sampling error, so the error bars are those of the rest alone
(as in Hutch++, Meyer et al. 2021, arXiv:2010.09649). Effective rank: stochastic Lanczos quadrature of the rest
(Ubaru, Chen & Saad 2017). All seeds are fixed: equal input, equal output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from geocont.measures.continuity import alignment

PROBES = 64
SEED = 20260504
#: Lanczos steps and starting vectors for the effective rank.
STEPS, STARTS = 24, 8


@dataclass(frozen=True)
class Side:
    """One side (``in``: W^T W, ``out``: W W^T) of a matrix, its leading directions taken out.

    Attributes:
        vectors: Leading singular vectors of this side, ``(d, k)``.
        sketch: (W^T W - H^T H - c) X for the probes X, ``(d, PROBES)``; c is the mean eigenvalue of the rest.
        mean: c.
    """

    vectors: Tensor
    sketch: Tensor
    mean: float


def probes(d: int, device: torch.device) -> Tensor:
    """Returns the shared random vectors of dimension d, ``(d, PROBES)``: independent signs."""
    generator = torch.Generator().manual_seed(SEED + d)
    return (torch.randint(0, 2, (d, PROBES), generator=generator, dtype=torch.int8) * 2 - 1).float().to(device)


def side_of(w: Tensor, vectors: Tensor, s: Tensor, scale: float) -> Side:
    """Sketches one side of ``w`` / scale.

    Args:
        w: ``(m, n)`` for the input side; its transpose for the output side.
        vectors: Leading singular vectors of length n, ``(n, k)``.
        s: Their singular values, ``(k,)``.
        scale: ||W||_F, so that all numbers are of the order of one.
    """
    x = probes(w.shape[1], w.device)
    weights = (s / scale).square()
    total = 1.0 - float(weights.sum())
    mean = max(total, 0.0) / w.shape[1]
    gram = w.mT @ (w @ x / scale) / scale
    sketch = gram - vectors @ (weights[:, None] * (vectors.mT @ x)) - mean * x
    return Side(vectors, sketch, mean)


def gram_estimate(
    a: Side, b: Side, weights_a: Tensor, weights_b: Tensor, energy_ab: Tensor, energy_ba: Tensor
) -> tuple[float, float]:
    """Trace-removed cosine of two Gram matrices, as ``measures.continuity.gram_cosine``, and its standard error.

    Args:
        a: One side of the lower layer, of trace one.
        b: The same side of the upper layer.
        weights_a: s_i^2 / ||W||_F^2 of the leading triplets, ``(k,)``.
        weights_b: The same of b.
        energy_ab: v^T G_b v for the leading vectors v of a, ``(k,)``.
        energy_ba: v^T G_a v for those of b.
    """
    d = len(a.sketch)
    overlap = (a.vectors.mT @ b.vectors).square()  # (k, k)
    leading = weights_a @ overlap @ weights_b
    # <H_a, R_b> + <R_a, H_b>: all of G on the other's leading directions, less what its own leading part does there.
    mixed = weights_a @ energy_ab - leading + weights_b @ energy_ba - leading
    constant = d * (a.mean * b.mean)
    rest = (a.sketch * b.sketch).sum(0)  # (PROBES,), each an unbiased value of <R_a - c_a, R_b - c_b>
    own_a, own_b = a.sketch.square().sum(0), b.sketch.square().sum(0)
    # <R_a, R_b> = <R_a - c_a, R_b - c_b> + c_b tr R_a + c_a tr R_b - d c_a c_b, and tr R = d c; traces removed: - 1 / d
    inner = leading + mixed + rest + constant - 1 / d
    norm_a = weights_a.square().sum() + own_a + d * a.mean**2 - 1 / d
    norm_b = weights_b.square().sum() + own_b + d * b.mean**2 - 1 / d
    return _ratio(inner.double(), norm_a.double(), norm_b.double())


def _ratio(inner: Tensor, norm_a: Tensor, norm_b: Tensor) -> tuple[float, float]:
    """mean(inner) / sqrt(mean(norm_a) mean(norm_b)) with its jackknife standard error over probes ``(p,)``."""
    count = len(inner)
    if float(norm_a.mean()) <= 0 or float(norm_b.mean()) <= 0:
        return math.nan, math.nan

    def without(values: Tensor) -> Tensor:
        return (values.sum() - values) / (count - 1)

    value = inner.mean() / (norm_a.mean() * norm_b.mean()).sqrt()
    left = without(inner) / (without(norm_a) * without(norm_b)).clamp(min=1e-300).sqrt()
    error = ((count - 1) / count * (left - left.mean()).square().sum()).sqrt()
    return float(value), float(error)


def sigma2_estimate(s_a: Tensor, a: Tensor, b: Tensor, scale: float) -> tuple[float, float]:
    """``sigma2`` of one side from the leading triplets, and how far off it may be.

    Args:
        s_a: Leading singular values of the lower layer, ``(k,)``.
        a: Its leading vectors, ``(d, k)``.
        b: Those of the upper layer.
        scale: ||W||_F of the lower layer.

    What the leading ones leave out is taken to be aligned as the second half of them is; the error is its weight times
    the distance between that and chance.
    """
    weights = (s_a / scale).square().double()
    pairs = alignment(a.mT, b.mT).double()
    rest = max(0.0, 1.0 - float(weights.sum()))
    tail = float(pairs[len(pairs) // 2 :].mean())
    chance = math.sqrt(2 / (math.pi * len(a)))
    return float((weights * pairs).sum()) + rest * tail, rest * max(abs(tail - chance), chance / 2)


def effective_rank_estimate(w: Tensor, s: Tensor, v: Tensor, u: Tensor) -> tuple[float, float]:
    """exp of the entropy of s_i / sum s (Roy & Vetterli 2007), and its standard error.

    Args:
        w: ``(m, n)``.
        s: Leading singular values ``(k,)``.
        v: Their right vectors ``(n, k)``.
        u: Their left vectors ``(m, k)``.
    """
    w, v = (w, v) if w.shape[0] >= w.shape[1] else (w.mT, u)  # n is the smaller side
    n, scale = w.shape[1], float(s[0])
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn(STARTS, n, generator=generator).to(w)
    x = x - (x @ v) @ v.mT
    x = x / torch.linalg.vector_norm(x, dim=1, keepdim=True)
    nodes, weights = _lanczos(w, v, x, scale)
    count = n - len(s)  # dimension of the rest
    root = nodes.clamp(min=0).sqrt()
    sums = count * (weights * root).sum(-1)  # (STARTS,) estimates of sum s_i / s_1 over the rest
    entropies = count * (weights * torch.where(root > 0, root * root.clamp(min=1e-300).log(), 0.0)).sum(-1)
    lead = (s / s[0]).double()
    lead_sum, lead_entropy = lead.sum(), (lead * lead.clamp(min=1e-300).log()).sum()

    def rank(total: Tensor, entropy: Tensor) -> Tensor:
        return torch.exp(total.log() - entropy / total)

    value = rank(lead_sum + sums.mean(), lead_entropy + entropies.mean())
    left = rank(
        lead_sum + (sums.sum() - sums) / (STARTS - 1), lead_entropy + (entropies.sum() - entropies) / (STARTS - 1)
    )
    error = ((STARTS - 1) / STARTS * (left - left.mean()).square().sum()).sqrt()
    return float(value), float(error)


def _lanczos(w: Tensor, v: Tensor, x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Quadrature nodes and weights ``(STARTS, steps)`` of the rest of W^T W / scale^2; unit starts ``(STARTS, n)``."""
    steps = min(STEPS, x.shape[1] - v.shape[1])
    basis = x.new_zeros(steps, *x.shape)  # (steps, STARTS, n)
    basis[0] = x
    diagonal, off = [], []
    for step in range(steps):
        y = _times(_times(basis[step], w.mT) / scale, w) / scale
        y = y - (y @ v) @ v.mT
        diagonal.append((basis[step] * y).sum(1))
        for _ in range(2):  # orthogonal to all that came before, each start for itself
            known = basis[: step + 1]
            y = y - torch.einsum("jb,jbn->bn", torch.einsum("jbn,bn->jb", known, y), known)
        if step < steps - 1:
            off.append(torch.linalg.vector_norm(y, dim=1))
            basis[step + 1] = y / off[-1].clamp(min=1e-30)[:, None]
    tridiagonal = torch.diag_embed(torch.stack(diagonal, -1).double())
    if off:
        beta = torch.stack(off, -1).double()
        tridiagonal = tridiagonal + torch.diag_embed(beta, 1) + torch.diag_embed(beta, -1)
    nodes, vectors = torch.linalg.eigh(tridiagonal)
    return nodes, vectors[:, 0].square()


def _times(rows: Tensor, w: Tensor) -> Tensor:
    """``rows @ w`` in the order in which ``w`` lies in memory, which for few rows is several times faster."""
    return rows.contiguous() @ w if w.stride(-1) == 1 else (w.mT @ rows.mT).mT
