"""Residual MLP: the toy model of arXiv 2605.04971, in which geometric continuity appears within minutes on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from geocont.errors import UserError
from geocont.models.activations import ACTIVATIONS

Activation = Literal["relu", "gelu", "silu", "tanh", "none", "radial"]
LayerNorm = Literal["none", "pre", "post"]
Initialisation = Literal["normal", "kaiming", "xavier", "orthogonal", "default"]


@dataclass
class ResidualMLPConfig:
    """Shape and ingredients of a residual MLP.

    Attributes:
        inputs: Number of input features.
        classes: Number of output classes.
        depth: Number of hidden layers, each one square matrix.
        width: Size of the hidden layers, and of the residual stream.
        residual: Whether a hidden layer adds to its input, h + act(W h), or replaces it, act(W h).
        activation: Nonlinearity; ``none`` is the identity, ``radial`` is x tanh(||x||), which commutes with rotations.
        layer_norm: No LayerNorm, one before each hidden matrix (``pre``), or one after each layer (``post``).
        initialisation: How hidden matrices start: ``normal`` with ``scale`` as standard deviation, ``kaiming`` (He,
            normal, for ReLU), ``xavier`` (normal), ``orthogonal``, or ``default``, PyTorch's own. ``kaiming``,
            ``xavier`` and ``orthogonal`` are multiplied by ``scale`` if it is given.
        scale: Standard deviation for ``normal`` (0.02 by default), otherwise that factor (1 by default).
        bias: Whether hidden layers have a bias. The first and last layer always have one.
    """

    inputs: int = 64
    classes: int = 10
    depth: int = 16
    width: int = 256
    residual: bool = True
    activation: Activation = "relu"
    layer_norm: LayerNorm = "none"
    initialisation: Initialisation = "normal"
    scale: float | None = None
    bias: bool = False

    def __post_init__(self) -> None:
        for key in ("inputs", "classes", "depth", "width"):
            if getattr(self, key) < 1:
                raise UserError(f"{key} must be at least 1, got {getattr(self, key)}")
        if self.scale is not None and not self.scale >= 0:
            raise UserError(f"scale must not be negative, got {self.scale}")


class ResidualMLP(nn.Module):
    """Linear embedding, ``depth`` hidden layers of one square matrix, linear read-out."""

    def __init__(self, config: ResidualMLPConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Linear(config.inputs, config.width)
        self.hidden = nn.ModuleList(HiddenLayer(config) for _ in range(config.depth))
        self.readout = nn.Linear(config.width, config.classes)

    def forward(self, x: Tensor) -> Tensor:
        """Maps inputs ``(B, inputs)`` to logits ``(B, classes)``; further dimensions of inputs are flattened."""
        h = self.embed(x.flatten(1))
        for layer in self.hidden:
            h = layer(h)
        return self.readout(h)


class HiddenLayer(nn.Module):
    """h + act(W h), or act(W h) without a residual connection."""

    def __init__(self, config: ResidualMLPConfig) -> None:
        super().__init__()
        self.residual = config.residual
        self.linear = nn.Linear(config.width, config.width, bias=config.bias)
        self.activation = ACTIVATIONS[config.activation]()
        self.pre = nn.LayerNorm(config.width) if config.layer_norm == "pre" else nn.Identity()
        self.post = nn.LayerNorm(config.width) if config.layer_norm == "post" else nn.Identity()
        _initialise(self.linear, config)

    def forward(self, h: Tensor) -> Tensor:
        """Maps the hidden state ``(B, width)`` to ``(B, width)``."""
        out = self.activation(self.linear(self.pre(h)))
        return self.post(h + out if self.residual else out)


@torch.no_grad()
def _initialise(linear: nn.Linear, config: ResidualMLPConfig) -> None:
    weight, factor = linear.weight, 1.0 if config.scale is None else config.scale
    match config.initialisation:
        case "normal":
            nn.init.normal_(weight, std=0.02 if config.scale is None else config.scale)
        case "kaiming":
            nn.init.kaiming_normal_(weight, nonlinearity="relu").mul_(factor)
        case "xavier":
            nn.init.xavier_normal_(weight).mul_(factor)
        case "orthogonal":
            nn.init.orthogonal_(weight, gain=factor)
        case "default":
            pass
    if linear.bias is not None and config.initialisation != "default":
        nn.init.zeros_(linear.bias)
