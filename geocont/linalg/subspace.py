"""Leading singular vectors of many matrices at once: randomized block Krylov with a certificate.

Method: Musco & Musco 2015 (arXiv:1504.05477), Halko, Martinsson & Tropp 2011 (arXiv:0909.4061). The Krylov space of
G = W W^T on the *smaller* side of W grows block by block, fully orthogonalised; its Rayleigh-Ritz vectors are the
singular vectors of that side. Matrices leave the iteration as soon as they are certified; what is not certified in the
end goes through the dense Gram matrix. Vectors are stored as rows, because ``rows @ W`` reads a row-major W in the
order in which it lies in memory (on a CPU two to three times faster than ``W.mT @ columns``).

Limit: all goes through G in the working precision, so directions with s_i / s_1 below about 3e-3 (float32) are noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from geocont.linalg.polar import eigh
from geocont.linalg.precision import full_precision

GAP = 1.02  # s_i / s_{i+1} from which a singular vector counts as well defined and is computed to full accuracy
TOLERANCE = 0.04  # accepted sine of the angle between computed and true u1: 1 - cos < 1e-3
RELAXED = 0.2  # factor of the angle where it is not well defined: do not iterate for what has no answer
SPACE_SHARE = 0.2  # sines of the leading (k-1)-space (root of their square sum) count this much: overlap error < 1e-2
KEPT, FRESH = 2, 4  # rows of a block beyond k: kept from call to call, and random ones of each call
PROBE_POWER = 2  # applications of G to the fresh rows of a warm start, before they join the block
LOW_RANK = 1e-5  # share of the Frobenius norm that a matrix of low rank may have beyond it: rounding
DENSE_SIDE = 64  # smaller side up to which the dense decomposition is used at once
SEED = 20150477


@dataclass(frozen=True)
class LeadingSubspace:
    """The k leading singular triplets of a matrix (m, n), or of each matrix of a batch (B, m, n).

    A zero matrix has s = 0, a matrix with NaN or Inf has s = NaN and residual NaN; both have zero vectors, and so have
    triplets beyond the numerical rank. Signs are arbitrary.
    """

    u: Tensor
    """(..., m, k) left singular vectors"""
    s: Tensor
    """(..., k) singular values, descending"""
    v: Tensor
    """(..., n, k) right singular vectors"""
    residual: Tensor
    """(...) estimated sine of the angle of u1, or SPACE_SHARE of that of the (k-1)-space if that is larger; times
    RELAXED where the gap of its singular values is below 1.02; certified when not above the tolerance; 0 where exact"""
    exact: Tensor
    """(...) bool: computed densely"""
    start: Tensor
    """(..., min(m, n), b) orthonormal block for the next call's ``start``, opaque to the caller"""


@torch.no_grad()
@full_precision()
def leading_subspace(
    w: Tensor, k: int = 6, *, start: Tensor | None = None, tolerance: float = TOLERANCE
) -> LeadingSubspace:
    """The k leading singular triplets of ``w`` (m, n) or (B, m, n), certified; see ``LeadingSubspace.residual``.

    ``start`` is the ``start`` of an earlier call on a nearby matrix of the same shape. Some random rows, pushed through
    W W^T a few times, join it at every call, so that a direction that overtakes all of the block's is seen at once if
    it stands out of the bulk (1.2 times the bulk's edge), and within a few calls otherwise: the block keeps what
    it learns. The global random state is not touched; equal input gives equal output.
    """
    if w.ndim not in (2, 3) or 0 in w.shape or k < 1:
        raise ValueError(f"leading_subspace takes (m, n) or (B, m, n) and k >= 1, got {tuple(w.shape)} and k = {k}")
    rows = _working(w)  # (B, d, l), d <= l
    d = rows.shape[1]
    k = min(k, d)
    if start is not None and start.shape != (*w.shape[:-2], d, min(d, k + KEPT)):
        raise ValueError(f"start {tuple(start.shape)} does not belong to a matrix {tuple(w.shape)} with k = {k}")
    if d <= max(DENSE_SIDE, 4 * (k + KEPT + FRESH)):
        x, residual, exact = _dense(rows, k)
    else:
        x, residual, exact = _krylov(rows, k, start, tolerance)
    return _triplets(w, rows, x, k, residual, exact)


@torch.no_grad()
@full_precision()
def exact_subspace(w: Tensor, k: int = 6) -> LeadingSubspace:
    """The slow reference: float64 ``torch.linalg.svd``, same conventions as ``leading_subspace``."""
    rows = _working(w)
    k = min(k, rows.shape[1])
    finite = rows.isfinite().flatten(1).all(1)
    u = torch.linalg.svd(torch.where(finite[:, None, None], rows, 0.0).double(), full_matrices=False)[0]
    x = u[..., : k + KEPT].mT.to(rows.dtype)
    residual = torch.where(finite, 0.0, math.nan).to(rows.dtype)
    return _triplets(w, rows, x, k, residual, torch.ones_like(finite))


@torch.no_grad()
@full_precision()
def svd_by_gram(w: Tensor, low_rank: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """All r = min(m, n) singular triplets by the smaller Gram matrix: u (..., m, r), s (..., r), v (..., n, r).

    Several times faster than ``torch.linalg.svd``; singular values below about 3e-3 s_1 (float32) are inaccurate. Those
    beyond the numerical rank come with zero vectors; a matrix with NaN or Inf has s = NaN and zero vectors.

    ``low_rank`` tells that the ranks are probably below r / 4: if indeed they are, only r / 4 triplets come, for a
    third of the price.
    """
    rows = _working(w)
    k = rows.shape[1]
    basis = _range(rows, k // 4) if low_rank and k > DENSE_SIDE else None
    if basis is None:
        x, residual, exact = _dense(rows, k)
    else:
        k = basis.shape[1]
        x, residual, exact = _dense(basis @ rows, k)
        x = x @ basis
    result = _triplets(w, rows, x, k, residual, exact)
    return result.u, result.s, result.v


def _working(w: Tensor) -> Tensor:
    """``w`` as (B, d, l) with d <= l, detached, at least float32; a view wherever possible."""
    w = w.detach()
    w = w if w.dtype in (torch.float32, torch.float64) else w.float()
    w = w if w.ndim == 3 else w[None]
    return w if w.shape[1] <= w.shape[2] else w.mT


def _triplets(w: Tensor, rows: Tensor, x: Tensor, k: int, residual: Tensor, exact: Tensor) -> LeadingSubspace:
    """Values and the other side's vectors from those of the smaller side, ``x`` (B, >= k, d), one product with W."""
    left = x[:, :k]
    right = left @ rows  # (B, k, l), rows of length s
    size = right.abs().amax((1, 2)).clamp(min=torch.finfo(right.dtype).tiny)[:, None]
    right = right / size[:, :, None]  # so that no square over- or underflows
    s = torch.linalg.vector_norm(right, dim=-1)  # (B, k)
    if bool((s[:, 1:] > s[:, :-1]).any()):  # order of near-ties and of rounding noise
        s, order = s.sort(dim=-1, descending=True)
        left = left.gather(1, order[..., None].expand_as(left))
        right = right.gather(1, order[..., None].expand_as(right))
    kept = s > rows.shape[1] * torch.finfo(s.dtype).eps * s[:, :1]  # numerical rank; False for NaN
    left = left * kept[..., None]
    right = torch.where(kept[..., None], right / s[..., None], 0.0)
    s = torch.where(residual.isnan()[:, None], math.nan, s * size)
    u, v = (left.mT, right.mT) if w.shape[-2] <= w.shape[-1] else (right.mT, left.mT)
    start = x[:, : k + KEPT].mT
    parts = (u, s, v, residual, exact, start)
    return LeadingSubspace(*(part if w.ndim == 3 else part[0] for part in parts))


def _dense(w: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Leading eigenvectors of the dense W W^T as rows (B, min(d, k + KEPT), d), residual (B,), exact (B,)."""
    size = w.abs().amax((1, 2))
    finite = size.isfinite()
    w = w / torch.where(finite & (size > 0), size, 1.0)[:, None, None]
    gram = torch.where(finite[:, None, None], w @ w.mT, 0.0)
    x = eigh(gram)[1].mT.flip(1)[:, : k + KEPT]
    return x, torch.where(finite, 0.0, math.nan).to(w.dtype), torch.ones_like(finite)


def _range(w: Tensor, rank: int) -> Tensor | None:
    """Orthonormal rows (B, rank, d) that span the columns of all W (B, d, l) up to rounding; None if there are more."""
    size = w.abs().amax((1, 2), keepdim=True)
    if not bool((size.isfinite() & (size > 0)).all()):
        return None
    w = w / size
    generator = torch.Generator(w.device).manual_seed(SEED)
    noise = torch.randn(rank, w.shape[2], generator=generator, device=w.device, dtype=w.dtype)
    basis = _orthonormal(noise @ w.mT)
    missing = _norm(torch.baddbmm(w, basis.mT, basis @ w, alpha=-1)) / _norm(w)
    return basis if bool((missing < LOW_RANK).all()) else None


def _norm(w: Tensor) -> Tensor:
    return torch.linalg.vector_norm(w, dim=(1, 2))


def _krylov(w: Tensor, k: int, start: Tensor | None, tolerance: float) -> tuple[Tensor, Tensor, Tensor]:
    """As ``_dense``, by block Krylov iteration; ``start`` (..., d, k + KEPT) or None."""
    batch, d = w.shape[:2]
    # Its own generator: training's random state stays as it is. A fixed seed: nearly equal input, nearly equal output.
    generator = torch.Generator(w.device).manual_seed(SEED)
    block = k + KEPT + FRESH
    # Other rows for each matrix: from common ones, vectors that are ill-defined would come out alike.
    fresh_rows = block if start is None else FRESH
    noise = _orthonormal(torch.randn(batch, fresh_rows, d, generator=generator, device=w.device, dtype=w.dtype))
    product = noise @ w
    scale = product.abs().amax((1, 2))  # a size of W for free: NaN or Inf if W has any, 0 only for a zero matrix
    x = torch.eye(k + KEPT, d, device=w.device, dtype=w.dtype).repeat(batch, 1, 1)  # what stays for zero (0) and
    residual = scale * 0.0  # non-finite matrices (NaN)
    exact = torch.zeros_like(scale, dtype=torch.bool)
    active = (scale.isfinite() & (scale > 0)).nonzero()[:, 0]
    if len(active) < batch:
        w, noise, product, scale = w[active], noise[active], product[active], scale[active]
    scale = scale[:, None, None]
    image = (product / scale) @ w.mT / scale  # q G
    q, kept = noise, None
    if start is not None:
        kept = start.detach().to(w.dtype).reshape(batch, d, -1).mT
        kept = kept if len(active) == batch else kept[active]
        for _ in range(PROBE_POWER - 1):
            image = _gram_times(_outside(image, kept), w, scale)
        q = _orthonormal(torch.cat([kept, _unit(_outside(image, kept))], 1))
        image = _gram_times(q, w, scale)
    h, steps, pace, before = image, 1 if start is not None else 3, 1.0, math.inf
    target = steps * block  # rows at which to look
    while len(active):
        while q.shape[1] < target:
            fresh = _next_block(image, q, generator)
            image = _gram_times(fresh, w, scale)
            q, h = torch.cat([q, fresh], 1), torch.cat([h, image], 1)  # (B, j b, d): orthonormal rows, and q G
        ritz, angle = _ritz(q, h, k)
        if kept is not None:  # chance rows that lead: there may be more such directions than rows, so be strict once
            known = (ritz[:, :k] @ kept.mT).square().sum(-1).amin(-1)
            angle, kept = torch.where(known < 0.5, angle * 10, angle), None
        done = angle <= tolerance
        if bool(done.all()) and len(active) == batch:
            return ritz, angle, exact
        x[active[done]], residual[active[done]] = ritz[done], angle[done]
        if bool(done.all()):
            break
        if bool(done.any()):
            active, w, scale, image, q, h, angle = (t[~done] for t in (active, w, scale, image, q, h, angle))
        now = math.log(float(angle.median()) / max(tolerance, 1e-9))
        pace = pace if math.isinf(before) else max((before - now) / steps, 0.5)  # e per block at first
        steps, before = min(max(math.ceil(now / pace), 1), 4), now
        target += steps * block
        if target > min(d // 2, 128 + d // 8):
            x[active], residual[active], exact[active] = _dense(w, k)
            break
    return x, residual, exact


def _gram_times(rows: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    """``rows @ (w w^T)`` / scale^2, never squaring the scale: (B, b, d)."""
    return (rows @ w / scale) @ w.mT / scale


def _outside(rows: Tensor, q: Tensor) -> Tensor:
    """``rows`` without their part in the span of the orthonormal rows ``q``."""
    return torch.baddbmm(rows, rows @ q.mT, q, alpha=-1)


def _unit(rows: Tensor) -> Tensor:
    return rows / torch.linalg.vector_norm(rows, dim=-1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)


def _orthonormal(rows: Tensor) -> Tensor:
    return torch.linalg.qr(rows.mT)[0].mT


def _next_block(image: Tensor, q: Tensor, generator: torch.Generator) -> Tensor:
    """Orthonormal rows (B, b, d) for the part of ``image`` (B, b, d) outside the rows of ``q``.

    Rows that bring nothing new would leave rounding noise from inside q: a hundredth of random rows fills their place,
    and the second projection works on unit rows. The Ritz step only asks for an orthonormal basis.
    """
    noise = torch.randn(image.shape[1:], generator=generator, device=q.device, dtype=q.dtype)
    return _orthonormal(_outside(_unit(_outside(image, q)) + 1e-2 * _unit(noise), q))


def _ritz(q: Tensor, h: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Leading Ritz vectors of G (B, k + KEPT, d) from q and h = q G (B, j, d), and ``LeadingSubspace.residual`` (B,).

    Second-order perturbation theory. Residuals r_i are orthogonal to q: they couple a Ritz vector to what lies below
    the last one looked at (``far``), and two Ritz vectors to each other only through it, by r_i . r_j / far (``mix``).
    Measured within a factor of two of the true angle, where |r_1| / (theta_1 - theta_2) is up to ten times too large;
    an estimate, not a bound. Looking at more Ritz vectors (a lower ``far``) accepts wrong 5-spaces: measured, don't.
    """
    count = k + KEPT + FRESH
    values, y = torch.linalg.eigh(-(q @ h.mT))  # negated: largest first
    values, y = -values[:, :count], y.mT[:, :count]
    x = y @ q  # (B, count, d)
    r = y @ h - values[..., None] * x  # (B, count, d)
    floor = (1 - GAP**-2) * values.clamp(min=0) + 30 * torch.finfo(q.dtype).eps * values[:, :1]
    far = torch.maximum(values - values[:, -1:], floor)
    coupling = r @ r.mT / far[..., None]
    gap = torch.maximum((values[:, :, None] - values[:, None, :]).abs(), floor[..., None])
    outside = coupling.diagonal(dim1=1, dim2=2) / far  # (B, count) squared sine towards far
    mix = (coupling / gap).square()  # (B, count, count) squared sine of i towards j
    correction = coupling.diagonal(dim1=1, dim2=2)  # by which the values may still grow

    def sine(i: int) -> Tensor:  # of the leading i-space; relaxed where it is ill-defined
        angle = (outside[:, :i].sum(-1) + mix[:, :i, i:].sum((1, 2))).sqrt()
        defined = values[:, i - 1] + correction[:, i - 1] > GAP**2 * values[:, i]
        return torch.where(defined, angle, angle * RELAXED)

    return x[:, : k + KEPT], torch.maximum(sine(1), SPACE_SHARE * sine(max(k - 1, 1)))
