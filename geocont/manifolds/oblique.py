"""Matrices with columns of norm one."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from geocont.manifolds.base import Manifold, column_norms


class Oblique(Manifold):
    """diag(W^T W) = 1; rows instead of columns where the matrix is wide. The residual is max abs (diag(W^T W) - 1)."""

    name: ClassVar[str] = "oblique"

    def projector(self, x: Tensor) -> Tensor:
        """Returns the diagonal part of X."""
        return torch.diag_embed(x.diagonal(dim1=-2, dim2=-1))

    def metric(self, w: Tensor) -> Tensor:
        """Returns W^T W ``(..., n, n)``, which is not diagonal."""
        return w.mT @ w

    def _proju(self, w: Tensor, u: Tensor) -> Tensor:
        return u - w * ((w * u).sum(-2, keepdim=True) / (w * w).sum(-2, keepdim=True))

    def _retract(self, w: Tensor) -> Tensor:
        return w / column_norms(w, self.name)

    def _residual(self, gram: Tensor) -> Tensor:
        return (gram.diagonal(dim1=-2, dim2=-1) - 1).abs().amax(-1)

    def _what(self) -> str:
        return "max |diag(W^T W) - 1|"
