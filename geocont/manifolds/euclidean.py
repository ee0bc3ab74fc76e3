"""No constraint at all."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from geocont.manifolds.base import Manifold


class Euclidean(Manifold):
    """All matrices; steps of spectral norm one on it are those of Muon."""

    name: ClassVar[str] = "euclidean"

    def projector(self, x: Tensor) -> Tensor:
        """Returns 0: nothing is constrained."""
        return torch.zeros_like(x)

    def _retract(self, w: Tensor) -> Tensor:
        return w

    def _proju(self, w: Tensor, u: Tensor) -> Tensor:
        return u

    def _residual(self, gram: Tensor) -> Tensor:
        return torch.zeros_like(gram[..., 0, 0])

    def _what(self) -> str:
        return "the residual"
