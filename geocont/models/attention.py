"""What the language models share: the contract of a language model, and attention with one place to watch it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from geocont.errors import UserError
from geocont.models.safetensors import Layout, WeightsFile, load_weights, open_weights, save_weights
from geocont.weights import WeightPattern


class Sizes(Protocol):
    """What every configuration of a language model has."""

    context: int
    vocabulary: int


class LanguageModel(nn.Module):
    """Maps tokens ``(B, T)`` int64 to logits ``(B, T, vocabulary)``; no logit depends on a later token."""

    config: Sizes
    layout: ClassVar[Layout]

    def weight_patterns(self) -> dict[str, WeightPattern]:
        """Returns where the matrices of each projection lie: projection -> pattern of parameter names."""
        raise NotImplementedError

    def load_safetensors(self, path: str | Path) -> None:
        """Takes the weights of a file in Hugging Face's layout, cast to this model's type.

        Args:
            path: The file, or a folder with ``model.safetensors``.

        Raises:
            UserError: The file is not there, cannot be read, or does not fit this model.
        """
        with open_weights(path, self.layout) as file:
            self.check_file(file)
            load_weights(self, file, self.is_redundant)

    def save_safetensors(self, path: str | Path) -> None:
        """Writes the weights to a file in Hugging Face's layout."""
        save_weights(self, path, self.layout)

    def check_file(self, file: WeightsFile) -> None:
        """Raises a UserError where a file is of another shape, but its tensors do not tell; by default it is not."""

    def is_redundant(self, name: str, file: WeightsFile) -> bool:
        """Tells whether a tensor that the model has no place for says nothing that the model lacks."""
        return False

    def check_context(self, tokens: Tensor) -> None:
        """Checks that a batch ``(B, T)`` is not longer than the context.

        Raises:
            UserError: It is.
        """
        if tokens.shape[1] > self.config.context:
            raise UserError(
                f"network.context is {self.config.context}, but a batch has {tokens.shape[1]} tokens a row;"
                f" set --model.network.context={tokens.shape[1]} or more, or shorten the rows"
            )


class ScaledDotProduct(nn.Module):
    """Causal softmax attention. A module of its own, so that a forward hook sees exactly q, k and v.

    Every attention holds it as ``core`` and calls it after any normalisation and rotation of q and k.

    Args:
        dropout: Share of attention weights that are dropped in training.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Maps q ``(B, H, T, head_dim)`` and k, v ``(B, H_kv, T, head_dim)`` to ``(B, H, T, head_dim)``.

        H is a multiple of H_kv; each head of k and v serves H / H_kv adjacent heads of q.
        """
        dropout = self.dropout if self.training else 0.0
        grouped = k.shape[1] != q.shape[1]
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=grouped)


class LinearAttention(nn.Module):
    """Causal attention without softmax: the mean over the visible keys s of <q_t, k_s> / sqrt(head_dim) v_s.

    Linear in each of q, k and v. To divide by the number of visible keys, which softmax's sum to one becomes where all
    scores are alike, is this project's choice: it keeps outputs of late and early tokens on one scale.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Maps q ``(B, H, T, head_dim)`` and k, v ``(B, H_kv, T, head_dim)`` to ``(B, H, T, head_dim)``."""
        share = q.shape[1] // k.shape[1]
        if share > 1:
            k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
        seen = torch.arange(1, q.shape[-2] + 1, device=q.device, dtype=q.dtype).unsqueeze(-1)  # (T, 1)
        scores = (q @ k.mT).tril() / (math.sqrt(q.shape[-1]) * seen)  # (B, H, T, T)
        return scores @ v


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Returns ``(B, T, heads * head_dim)`` as ``(B, heads, T, head_dim)``, a view."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """Returns ``(B, heads, T, head_dim)`` as ``(B, T, heads * head_dim)``."""
    return x.transpose(1, 2).flatten(2)
