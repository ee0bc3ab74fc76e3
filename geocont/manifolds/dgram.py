"""Matrices with orthogonal columns of free norms."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from geocont.errors import UserError
from geocont.manifolds.base import Manifold, column_norms, off_diagonal
from geocont.manifolds.stiefel import orthonormal, polar_factor


class DGram(Manifold):
    """W^T W is diagonal; rows instead of columns where the matrix is wide.

    The residual is max abs (W^T W)_ij over i != j, relative to the norms of both columns. A step goes back to the
    manifold column by column in its own order, and keeps norms (Q = polar(W' N^-1), W+ = Q diag(Q^T W'), N the norms
    of W').

    Args:
        lo: Least norm of a column, 0 for none.
        hi: Largest norm of a column, by default none.

    Raises:
        UserError: Not 0 <= lo <= hi, or hi is 0.
    """

    name: ClassVar[str] = "dgram"

    def __init__(self, lo: float = 0.0, hi: float = float("inf")) -> None:
        if not (0 <= lo <= hi and hi > 0):
            raise UserError(f"manifold dgram: column norms must be bounded by 0 <= lo <= hi, got {lo} and {hi}")
        self.lo, self.hi = lo, hi

    def projector(self, x: Tensor) -> Tensor:
        """Returns X without its diagonal."""
        return off_diagonal(x)

    def _projx(self, w: Tensor) -> Tensor:
        return self._rescaled(w, polar_factor(w / column_norms(w, self.name)))

    def _retract(self, w: Tensor) -> Tensor:
        return self._rescaled(w, orthonormal(w / column_norms(w, self.name)))

    def _rescaled(self, w: Tensor, q: Tensor) -> Tensor:
        return q * (q * w).sum(-2, keepdim=True).clamp(self.lo, self.hi)

    def _residual(self, gram: Tensor) -> Tensor:
        d = gram.diagonal(dim1=-2, dim2=-1).clamp_min(torch.finfo(gram.dtype).tiny).sqrt()
        return (off_diagonal(gram) / (d[..., :, None] * d[..., None, :])).abs().amax((-2, -1))

    def _what(self) -> str:
        return "the largest off-diagonal entry of W^T W, relative to the columns' norms,"

    def _check_further(self, w: Tensor) -> tuple[bool, str | None]:
        norms = torch.linalg.vector_norm(w.float(), dim=-2)
        least, largest = float(norms.min()), float(norms.max())
        if least < self.lo * (1 - 1e-5) or largest > self.hi * (1 + 1e-5):
            return False, f"column norms {least:.3g} to {largest:.3g} do not lie within {self.lo:g} to {self.hi:g}"
        if least == 0:
            return False, "a column is zero"
        return True, None

    def __repr__(self) -> str:
        return f"DGram(lo={self.lo:g}, hi={self.hi:g})"
