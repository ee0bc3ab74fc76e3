"""What all manifolds of weight matrices share.

Names are geoopt's: ``projx`` puts a matrix on the manifold, ``proju`` projects onto its tangent space, ``retr`` takes
a step and comes back. All take batches ``(..., m, n)``; a constraint holds on the smaller side, so that a wide matrix
is handled as its transpose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from geocont.errors import UserError
from geocont.linalg.precision import full_precision


class Manifold:
    """A constraint P(W^T W) = target on tall matrices, P a self-adjoint projector on symmetric n x n matrices."""

    name: ClassVar[str]

    def projector(self, x: Tensor) -> Tensor:
        """Returns P(X), the constrained part of symmetric matrices ``(..., n, n)``."""
        raise NotImplementedError

    def metric(self, w: Tensor) -> Tensor:
        """Returns W^T W of tall matrices on the manifold, as its diagonal ``(..., n)`` where it has nothing else."""
        return (w * w).sum(-2)

    @full_precision()
    def residual(self, w: Tensor) -> Tensor:
        """Returns how far matrices ``(..., m, n)`` are from the manifold ``(...)``, 0 on it; see each manifold."""
        tall = _tall(w).float()
        return self._residual(tall.mT @ tall)

    def projx(self, w: Tensor) -> Tensor:
        """Returns points of the manifold near ``w``."""
        return _on_tall(self._projx, w)

    def proju(self, w: Tensor, u: Tensor) -> Tensor:
        """Returns U - W M, M symmetric, which is tangent at the point W: P(W^T U + U^T W) = 0."""
        return _on_tall(self._proju, w, u)

    def retr(self, w: Tensor, u: Tensor) -> Tensor:
        """Returns the point of the manifold to which the step ``u`` from the point ``w`` leads; w itself for u = 0."""
        return _on_tall(lambda w, u: self._retract(w + u), w, u)

    @full_precision()
    def tangent_residual(self, w: Tensor, u: Tensor) -> Tensor:
        """Returns ||P(W^T U + U^T W)||_F / (||W||_F ||U||_F) ``(...)``; 0 for a zero U."""
        w, u = _tall(w), _tall(u)
        inner = w.mT @ u
        norms = torch.linalg.matrix_norm(w) * torch.linalg.matrix_norm(u)
        return torch.linalg.matrix_norm(self.projector(inner + inner.mT)) / norms.clamp_min(torch.finfo(w.dtype).tiny)

    def check_point_on_manifold(self, w: Tensor, atol: float = 1e-5) -> tuple[bool, str | None]:
        """Tells whether a matrix, or each of a batch, lies on the manifold.

        Returns:
            (True, None), or (False, the reason).
        """
        if w.ndim < 2:
            return False, f"a point must be a matrix, got shape {tuple(w.shape)}"
        if not bool(torch.isfinite(w).all()):
            return False, "it has a NaN or an infinite entry"
        worst = float(self.residual(w).max()) if w.numel() else 0.0
        if worst > atol:
            return False, f"{self._what()} is {worst:.2e}, above {atol:.0e}"
        return self._check_further(_tall(w))

    def multiplier(self, d: Tensor, inner: Tensor) -> Tensor:
        """Returns M = P(B + B^T)_ij / (d_i + d_j) of the tangent projection, B = W^T U ``(..., n, n)``."""
        d = d.diagonal(dim1=-2, dim2=-1) if d.ndim == inner.ndim else d
        return self.projector(inner + inner.mT) / (d[..., :, None] + d[..., None, :])

    def _projx(self, w: Tensor) -> Tensor:
        return self._retract(w)

    def _proju(self, w: Tensor, u: Tensor) -> Tensor:
        return u - w @ self.multiplier((w * w).sum(-2), w.mT @ u)

    def _retract(self, w: Tensor) -> Tensor:
        raise NotImplementedError

    def _residual(self, gram: Tensor) -> Tensor:
        raise NotImplementedError

    def _what(self) -> str:
        raise NotImplementedError

    def _check_further(self, w: Tensor) -> tuple[bool, str | None]:
        return True, None

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def off_diagonal(x: Tensor) -> Tensor:
    """Returns matrices ``(..., n, n)`` without their diagonals."""
    return x - torch.diag_embed(x.diagonal(dim1=-2, dim2=-1))


def column_norms(w: Tensor, name: str) -> Tensor:
    """Returns the norms ``(..., 1, n)`` of columns that have a direction.

    Raises:
        UserError: A column is zero.
    """
    norms = torch.linalg.vector_norm(w, dim=-2, keepdim=True)
    if bool((norms == 0).any()):
        raise UserError(
            f"manifold {name}: a column of a {w.shape[-2]} x {w.shape[-1]} matrix is zero and has no direction:"
            " initialise it otherwise, or leave it unconstrained"
        )
    return norms


def _tall(w: Tensor) -> Tensor:
    return w if w.shape[-2] >= w.shape[-1] else w.mT


def _on_tall(function: Callable[..., Tensor], w: Tensor, *others: Tensor) -> Tensor:
    if w.shape[-2] >= w.shape[-1]:
        return function(w, *others)
    return function(w.mT, *(other.mT for other in others)).mT
