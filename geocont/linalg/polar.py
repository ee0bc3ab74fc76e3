"""Polar factors: the matrix sign of a rectangular matrix, and inverse square roots of symmetric ones, in batches."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice, repeat
from typing import Literal

import torch
from torch import Tensor

Coefficients = tuple[float, float, float]
Root = Literal["eigh", "newton_schulz"]

#: Odd quintics x -> a x + b x^3 + c x^5 on singular values in [0, 1]; beyond its end, a schedule repeats its last one.
SCHEDULES: dict[str, tuple[Coefficients, ...]] = {
    # Converges cubically from (0, 1.5); Taylor expansion of x (x^2)^(-1/2), Kovarik 1970, Bjorck and Bowie 1971.
    "newton_schulz": ((1.875, -1.25, 0.375),),
    # Fast for five steps and never exact: singular values end in about [0.68, 1.13]; K. Jordan 2024, torch.optim.Muon.
    "muon": ((3.4445, -4.7750, 2.0315),),
    # Optimal in each step for singular values from 1e-3; Amsel et al. 2025, arXiv 2505.16932, Algorithm 1.
    "polar_express": (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845749493, 0.4188073119525673),
        (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
        (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
        (1.875, -1.25, 0.375),
    ),
}
#: Polar Express divides its coefficients so, but for the last ones, lest rounding push a singular value above 1.
SAFETY = 1.01
STEPS = {"newton_schulz": 20, "muon": 5, "polar_express": 10}
#: Share of the largest singular value below which ``eigh`` takes one for zero: the rounding of float32's entries.
RANK_CUT = 1e-6
#: Side from which the matrices of a batch are worth threads of their own, on so many cores at most (see ``_eigh``).
THREAD_SIDE, THREADS = 128, 4


def schedule(name: str, steps: int) -> list[Coefficients]:
    """Returns the coefficients of the first ``steps`` steps of a named schedule.

    Raises:
        ValueError: There is no such schedule, or ``steps`` is below 1.
    """
    if name not in SCHEDULES:
        raise ValueError(f"method must be one of {', '.join([*SCHEDULES, 'eigh'])}, got {name!r}")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    steady = SCHEDULES[name][-1]
    found = list(islice(chain(SCHEDULES[name], repeat(steady)), steps))
    if name == "polar_express":
        found = [(a / SAFETY, b / SAFETY**3, c / SAFETY**5) if (a, b, c) != steady else steady for a, b, c in found]
    return found


def msign(
    x: Tensor, method: str = "polar_express", steps: int | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Returns the polar factor U V^T of X = U S V^T, whose nonzero singular values are 1.

    The scale of X does not matter, zero stays zero, and a matrix with a NaN or Inf is NaN throughout.

    Args:
        x: Matrices ``(..., m, n)``, tall or wide, of any floating type.
        method: ``polar_express``, ``newton_schulz`` or ``muon``, polynomial iterations that need products only (see
            :data:`SCHEDULES`); or ``eigh``, in float64, exact for singular values above 1e-6 of the
            largest, zero below.
        steps: Of the iteration; by default 10, 20 and 5.
        dtype: In which the products are taken: bfloat16 is what optimizers use on accelerators.

    Returns:
        ``(..., m, n)``, of the type of ``x``.
    """
    if x.numel() == 0:
        return x.clone()
    tall = x if x.shape[-2] >= x.shape[-1] else x.mT
    scale = tall.detach().abs().amax((-2, -1), keepdim=True).float()
    finite = torch.isfinite(scale)
    y = torch.where(finite, tall.float() / torch.where(scale == 0, 1, scale), 0)  # else squares of 1e-20 would be zero
    if method == "eigh":
        y = y.double()
        y = y @ inverse_sqrt(y.mT @ y, cut=RANK_CUT**2)
    else:
        norm = torch.linalg.matrix_norm(y, keepdim=True)
        y = (y / torch.where(norm == 0, 1, norm)).to(dtype)
        for a, b, c in schedule(method, STEPS.get(method, 1) if steps is None else steps):
            gram = y.mT @ y
            y = a * y + y @ (b * gram + c * (gram @ gram))
    y = torch.where(finite, y.float(), torch.nan)
    return (y if tall is x else y.mT).to(x.dtype)


def inverse_sqrt(s: Tensor, root: Root = "eigh", cut: float = 0.0) -> Tensor:
    """Returns S^(-1/2) of symmetric positive semi-definite matrices.

    Args:
        s: ``(..., n, n)``.
        root: ``eigh``, or ``newton_schulz``, which needs products only; in float32 it is good for condition numbers up
            to 1e6.
        cut: Share of the largest eigenvalue up to which an eigenvalue counts as zero and stays zero (``eigh`` only).

    Returns:
        ``(..., n, n)``; zero for a zero matrix.
    """
    if root == "newton_schulz":
        return _inverse_sqrt_by_products(s)
    values, vectors = eigh(s)
    return (vectors * inverse_sqrt_of_eigenvalues(values, cut)[..., None, :]) @ vectors.mT


def inverse_sqrt_of_eigenvalues(values: Tensor, cut: float = 0.0) -> Tensor:
    """Returns lambda^(-1/2) of eigenvalues ``(..., n)`` in ascending order, 0 where they count as zero."""
    nought = values <= cut * values[..., -1:].clamp_min(0)
    return torch.where(nought, 0, values.masked_fill(nought, 1).rsqrt())


def eigh(s: Tensor) -> tuple[Tensor, Tensor]:
    """Returns eigenvalues, ascending, and eigenvectors of finite symmetric matrices ``(..., n, n)``.

    LAPACK's float32 solver gives up on some matrices with many equal eigenvalues, or returns NaN; in float64 it does
    neither.
    """
    try:
        values, vectors = _eigh(s)
        failed = not bool(vectors.isfinite().all()) and bool(s.isfinite().all())
    except torch.linalg.LinAlgError:
        failed = True
    if failed:
        values, vectors = torch.linalg.eigh(s.double())
    return values.to(s.dtype), vectors.to(s.dtype)


def _eigh(s: Tensor) -> tuple[Tensor, Tensor]:
    """As ``torch.linalg.eigh``, the matrices of a batch ``(B, n, n)`` dealt to threads on a CPU of few cores.

    LAPACK takes one matrix after the other and splits each over all cores, whose threads then wait for each other
    hundreds of times: that gains nothing on two idle cores, and where others share these, it takes many times as long.
    """
    threads = torch.get_num_threads()
    few = s.ndim == 3 and len(s) >= threads and s.shape[-1] >= THREAD_SIDE and 2 <= threads <= THREADS
    if not few or s.device.type != "cpu":
        return torch.linalg.eigh(s)
    recording = torch.is_grad_enabled()  # which a thread does not inherit

    def part(matrices: Tensor) -> tuple[Tensor, Tensor]:
        with torch.set_grad_enabled(recording):
            return torch.linalg.eigh(matrices)

    with ThreadPoolExecutor(threads) as pool:  # for this call only: none is left when a process forks
        values, vectors = zip(*pool.map(part, s.tensor_split(threads)), strict=True)
    return torch.cat(values), torch.cat([x.mT for x in vectors]).mT  # columns are contiguous, as LAPACK leaves them


def _inverse_sqrt_by_products(s: Tensor) -> Tensor:
    """Polar Express on a matrix that is never formed, only its Gram matrix: R <- p(R) R p(R), Q <- Q p(R)."""
    identity = torch.eye(s.shape[-1], dtype=s.dtype, device=s.device)
    norm = torch.linalg.matrix_norm(s, keepdim=True)  # of Frobenius: at most sqrt(n) above the largest eigenvalue
    scale = torch.where(norm == 0, 1, norm)
    q, r = identity.expand_as(s), s / scale
    for a, b, c in schedule("polar_express", STEPS["polar_express"] + 2):
        p = a * identity + b * r + c * (r @ r)
        q = q @ p
        r = p @ r @ p
        r = (r + r.mT) / 2
    return torch.where(norm == 0, 0, (q + q.mT) / 2 / scale.sqrt())
