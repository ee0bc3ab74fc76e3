"""Nonlinearities of a layer, by name: those in use, and those that single out no basis."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Radial(nn.Module):
    """x tanh(||x||): nonlinear, yet it commutes with every rotation of its input, so it breaks no symmetry."""

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``(..., d)`` to ``(..., d)``, the norm taken over the last dimension."""
        return x * torch.tanh(x.norm(dim=-1, keepdim=True))


ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
    "none": nn.Identity,
    "radial": Radial,
}
