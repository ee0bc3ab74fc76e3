"""Spectra of weight matrices and what their constraint leaves of them."""

from __future__ import annotations

import torch
from torch import Tensor

NAMES = (
    "sigma_max",
    "sigma_min",
    "condition",
    "stable_rank",
    "gram_off_diagonal",
    "column_norm_min",
    "column_norm_max",
)


@torch.no_grad()
def singular_values(w: Tensor) -> Tensor:
    """Returns singular values ``(..., min(m, n))``, ascending, of ``(..., m, n)``; NaN where a matrix is not finite.

    Through the Gram matrix in float64: LAPACK's own SVD fails on matrices with many equal singular values, such as
    those on Stiefel. Values below 1e-8 of the largest are rounding.
    """
    finite = torch.isfinite(w).all(-1).all(-1)
    wide = torch.where(finite[..., None, None], w, 0).double()
    gram = wide @ wide.mT if w.shape[-2] < w.shape[-1] else wide.mT @ wide
    return torch.where(finite[..., None], torch.linalg.eigvalsh(gram).clamp_min(0).sqrt(), torch.nan)


@torch.no_grad()
def spectra(w: Tensor) -> dict[str, list[float]]:
    """Returns the spectral measures of matrices ``(L, m, n)``, L values of each, NaN where one has no value.

    ``sigma_max``, ``sigma_min``; ``condition``, their ratio (infinite, so without value, for a singular matrix);
    ``stable_rank``, ||W||_F^2 / sigma_max^2 (0 for a zero matrix); ``gram_off_diagonal``, the norm of W^T W without its
    diagonal, relative to that of W^T W; ``column_norm_min`` and ``column_norm_max``. Columns are those of the smaller
    side, on which constraints hold: rows of a wide matrix.
    """
    w = w if w.shape[-2] >= w.shape[-1] else w.mT
    s = singular_values(w)
    wide = w.double()
    gram = wide.mT @ wide
    norms = gram.diagonal(dim1=-2, dim2=-1).sqrt()
    whole = torch.linalg.matrix_norm(gram)
    off = torch.linalg.matrix_norm(gram - torch.diag_embed(norms.square()))
    largest, least = s[..., -1], s[..., 0]
    values = {
        "sigma_max": largest,
        "sigma_min": least,
        "condition": torch.where(least > 0, largest / least, torch.nan),
        "stable_rank": torch.where(largest > 0, (s / largest[..., None]).square().sum(-1), largest),
        "gram_off_diagonal": off / whole,
        "column_norm_min": norms.amin(-1),
        "column_norm_max": norms.amax(-1),
    }
    return {name: value.tolist() for name, value in values.items()}
