"""Matrices with orthonormal columns."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from geocont.errors import UserError
from geocont.linalg.polar import SCHEDULES, eigh, inverse_sqrt
from geocont.manifolds.base import Manifold

#: Distance of a Gram matrix from the identity up to which products alone take it there (singular values up to 1.5).
NEAR = 1.0
#: Square of the smallest singular value, relative to the Frobenius norm, that full rank needs in float64.
RANK = 1e-14
#: Distance that counts as none: what rounding leaves.
DONE = 1e-6


class Stiefel(Manifold):
    """W^T W = I; rows instead of columns where the matrix is wide. The residual is max abs (W^T W - I)."""

    name: ClassVar[str] = "stiefel"

    def projector(self, x: Tensor) -> Tensor:
        """Returns X: all of the Gram matrix is constrained."""
        return x

    def metric(self, w: Tensor) -> Tensor:
        """Returns ones ``(..., n)``."""
        return torch.ones_like(w[..., 0, :])

    def _proju(self, w: Tensor, u: Tensor) -> Tensor:
        inner = w.mT @ u
        return u - w @ ((inner + inner.mT) / 2)

    def _projx(self, w: Tensor) -> Tensor:
        return polar_factor(w)

    def _retract(self, w: Tensor) -> Tensor:
        return orthonormal(w)

    def _residual(self, gram: Tensor) -> Tensor:
        identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        return (gram - identity).abs().amax((-2, -1))

    def _what(self) -> str:
        return "max |W^T W - I|"


def polar_factor(w: Tensor) -> Tensor:
    """Returns the matrix with orthonormal columns nearest to ``w`` ``(..., m, n)``, computed in float64.

    Raises:
        UserError: A matrix has no full rank, so that there is no nearest one.
    """
    wide = w.double()
    norm = torch.linalg.matrix_norm(wide, keepdim=True)
    values, vectors = eigh(wide.mT @ wide / torch.where(norm == 0, 1, norm).square())
    if w.numel() and bool((values[..., 0] < RANK).any()):
        raise UserError(
            f"a matrix of {w.shape[-2]} x {w.shape[-1]} has no full rank (it is zero, or a column depends on others):"
            " initialise it otherwise, or leave it unconstrained"
        )
    q = wide @ ((vectors * values.rsqrt()[..., None, :]) @ vectors.mT) / norm
    return orthonormal(q).to(w.dtype)


def orthonormal(w: Tensor) -> Tensor:
    """Returns the polar factor of matrices of full rank ``(..., m, n)``.

    After a step of at most 0.5 in the spectral norm, one to three quintic Newton-Schulz steps do, taken on the Gram
    matrix: W itself is multiplied once. What is further off goes through eigenvalues in float64 first.
    """
    gram = w.mT @ w
    distance = _distance(gram)
    if distance < NEAR:
        return w @ _from_near(gram, distance)
    q = w.double()
    q = q @ inverse_sqrt(q.mT @ q, cut=RANK)
    gram = q.mT @ q
    distance = _distance(gram)
    return (q @ _from_near(gram, distance) if distance < NEAR else q).to(w.dtype)


def _distance(gram: Tensor) -> float:
    """Returns a bound of the largest distance, in the spectral norm, of Gram matrices from the identity."""
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    return float(torch.linalg.matrix_norm(gram - identity, ord=torch.inf).max())


def _from_near(gram: Tensor, distance: float) -> Tensor:
    """Returns Z with Z W^T W Z = I from W^T W ``(..., n, n)`` within ``distance`` < 1 of the identity."""
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    a, b, c = SCHEDULES["newton_schulz"][0]
    z = identity.expand_as(gram)
    while True:
        p = a * identity + b * gram + c * (gram @ gram)
        z = z @ p
        distance = distance**3  # at most: the error of a quintic step is 5/16 of the cube of the distance, and less
        if distance < DONE:
            return z
        gram = p @ gram @ p
