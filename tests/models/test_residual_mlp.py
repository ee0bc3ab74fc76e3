"""The residual MLP against its formula, for every choice it offers."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from geocont.errors import UserError
from geocont.models import ResidualMLP, ResidualMLPConfig
from geocont.models.activations import ACTIVATIONS, Radial
from geocont.models.residual_mlp import Activation, Initialisation, LayerNorm


def test_every_choice_has_its_implementation() -> None:
    assert set(get_args(Activation)) == set(ACTIVATIONS)


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("layer_norm", get_args(LayerNorm))
@pytest.mark.parametrize("activation", get_args(Activation))
def test_forward_follows_the_formula(residual: bool, layer_norm: LayerNorm, activation: Activation) -> None:
    config = ResidualMLPConfig(6, 3, 2, 8, residual, activation, layer_norm, scale=0.3, bias=True)
    model, x = ResidualMLP(config), torch.randn(5, 2, 3)
    functions = {"gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu, "none": lambda z: z}
    functions |= {"relu": torch.relu, "tanh": torch.tanh, "radial": lambda z: z * z.norm(dim=1, keepdim=True).tanh()}

    def norm(z: torch.Tensor) -> torch.Tensor:
        return (z - z.mean(1, keepdim=True)) / (z.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()

    h = x.reshape(5, 6) @ model.embed.weight.T + model.embed.bias
    for layer in model.hidden:
        z = norm(h) if layer_norm == "pre" else h
        out = functions[activation](z @ layer.linear.weight.T + layer.linear.bias)
        h = h + out if residual else out
        h = norm(h) if layer_norm == "post" else h
    expected = h @ model.readout.weight.T + model.readout.bias
    assert torch.allclose(model(x), expected, atol=1e-5)


def test_radial_commutes_with_rotations_and_the_others_do_not() -> None:
    x, rotation = torch.randn(4, 6), torch.linalg.qr(torch.randn(6, 6))[0]
    assert torch.allclose(Radial()(x @ rotation), Radial()(x) @ rotation, atol=1e-5)
    assert not torch.allclose(torch.relu(x @ rotation), torch.relu(x) @ rotation, atol=1e-2)


@pytest.mark.parametrize(
    ("initialisation", "scale", "deviation"),
    [
        ("normal", None, 0.02),
        ("normal", 0.3, 0.3),
        ("kaiming", None, (2 / 200) ** 0.5),
        ("kaiming", 0.5, 0.5 * (2 / 200) ** 0.5),
        ("xavier", None, 200**-0.5),
        ("orthogonal", 2.0, 2 * 200**-0.5),
        ("default", None, (1 / 3 / 200) ** 0.5),
    ],
)
def test_initial_scales(initialisation: Initialisation, scale: float | None, deviation: float) -> None:
    torch.manual_seed(0)
    model = ResidualMLP(ResidualMLPConfig(depth=3, width=200, initialisation=initialisation, scale=scale))
    weights = torch.stack([layer.linear.weight for layer in model.hidden])
    assert weights.std().item() == pytest.approx(deviation, rel=0.02)
    assert all(layer.linear.bias is None for layer in model.hidden)


def test_values_out_of_range_are_named() -> None:
    with pytest.raises(UserError, match="depth must be at least 1, got 0"):
        ResidualMLPConfig(depth=0)
    with pytest.raises(UserError, match="scale must not be negative, got -1"):
        ResidualMLPConfig(scale=-1.0)
