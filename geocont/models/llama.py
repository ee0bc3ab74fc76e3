"""Llama: rotary positions, RMSNorm before each sublayer, grouped heads of k and v, gated MLP; and its ablations."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from geocont.errors import UserError
from geocont.models.activations import ACTIVATIONS
from geocont.models.attention import LanguageModel, LinearAttention, ScaledDotProduct, merge_heads, split_heads
from geocont.models.safetensors import Layout, WeightsFile, open_weights
from geocont.weights import WeightPattern

#: Hugging Face's files; those of old models hold the rotary frequencies.
LAYOUT = Layout(prefix="model.", ignored=r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
INITIAL_DEVIATION = 0.02

Activation = Literal["silu", "gelu", "relu", "none", "radial"]
Core = Literal["softmax", "linear"]


@dataclass
class LlamaConfig:
    """Shape and ingredients of a Llama; the defaults are a model of 34 million parameters.

    Attributes:
        layers: Number of blocks, each of attention and MLP.
        heads: Attention heads of a block; they share the width between them.
        kv_heads: Heads of k and v, each shared by heads / kv_heads heads of q; by default as many as ``heads``.
        width: Size of the residual stream.
        hidden: Size of the MLP's hidden layer.
        context: Largest number of tokens in a row.
        vocabulary: Number of tokens; may exceed that of the data.
        tied: Whether the head is the token embedding's matrix, or one of its own.
        rope_theta: Base of the wavelengths of rotary positions.
        norm_eps: What RMSNorm adds to the mean square.
        activation: Nonlinearity of the MLP; ``none`` is the identity, ``radial`` x tanh(||x||), which commutes with
            rotations.
        gate: Whether the MLP is gated, down(act(gate x) * up x), or plain, down(act(up x)).
        attention_residual: Whether attention adds to the residual stream, or replaces it.
        mlp_residual: Whether the MLP adds to the residual stream, or replaces it.
        norm: Whether RMSNorm comes before sublayers and head, or nothing does.
        qk_norm: Whether RMSNorm comes before the rotation of each head's q and k, as in Qwen 3.
        attention: ``softmax``, or ``linear``: no softmax, a mean of values weighted by scores (see LinearAttention).
    """

    layers: int = 8
    heads: int = 8
    kv_heads: int | None = None
    width: int = 512
    hidden: int = 1376
    context: int = 512
    vocabulary: int = 16384
    tied: bool = True
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    activation: Activation = "silu"
    gate: bool = True
    attention_residual: bool = True
    mlp_residual: bool = True
    norm: bool = True
    qk_norm: bool = False
    attention: Core = "softmax"

    def __post_init__(self) -> None:
        for key in ("layers", "heads", "width", "hidden", "context", "vocabulary"):
            if getattr(self, key) < 1:
                raise UserError(f"network.{key} must be at least 1, got {getattr(self, key)}")
        if self.width % (2 * self.heads):  # rotary positions turn pairs
            raise UserError(f"network.width must be a multiple of twice network.heads ({self.heads}), got {self.width}")
        if self.kv_heads is not None and (self.kv_heads < 1 or self.heads % self.kv_heads):
            raise UserError(f"network.kv_heads must divide network.heads ({self.heads}), got {self.kv_heads}")
        for key in ("rope_theta", "norm_eps"):
            if not getattr(self, key) > 0:
                raise UserError(f"network.{key} must be above 0, got {getattr(self, key)}")
        for key, kind in (("activation", Activation), ("attention", Core)):
            if getattr(self, key) not in get_args(kind):
                raise UserError(f"network.{key} must be one of {', '.join(get_args(kind))}, got {getattr(self, key)!r}")

    @property
    def groups(self) -> int:
        """Number of heads of k and v."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return self.width // self.heads


class Llama(LanguageModel):
    """Llama with the parameter names of Hugging Face's."""

    config: LlamaConfig
    layout = LAYOUT

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = _norm(config.width, config)
        if not config.tied:
            self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.rotary = Rotary(config.context, config.head_dim, config.rope_theta)
        self._initialise()

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps tokens ``(B, T)`` int64 to logits ``(B, T, vocabulary)`` of the token after each.

        Raises:
            UserError: T exceeds the context.
        """
        self.check_context(tokens)
        x = self.embed_tokens(tokens)  # (B, T, D)
        for block in self.layers:
            x = block(x, self.rotary)
        return F.linear(self.norm(x), self.embed_tokens.weight if self.config.tied else self.lm_head.weight)

    def weight_patterns(self) -> dict[str, WeightPattern]:
        """Returns where the seven projections of each layer lie, six without a gate."""
        names = {f"{name}": rf"layers\.(\d+)\.self_attn\.{name}_proj\.weight" for name in "qkvo"}
        mlp = ("gate", "up", "down") if self.config.gate else ("up", "down")
        names |= {name: rf"layers\.(\d+)\.mlp\.{name}_proj\.weight" for name in mlp}
        return {projection: WeightPattern(name) for projection, name in names.items()}

    @torch.no_grad()
    def _initialise(self) -> None:
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=INITIAL_DEVIATION)

    @classmethod
    def from_safetensors(cls, path: str | Path, config: LlamaConfig | None = None) -> Llama:
        """Builds a model with the weights of a file in Hugging Face's layout.

        Args:
            path: The file, or a folder with ``model.safetensors``.
            config: Shape of the model. By default that of the ``config.json`` beside the file.

        Raises:
            UserError: The file is not there, cannot be read, does not fit the shape, or ``config.json`` is missing or
                asks for what this model does not have.
        """
        if config is None:
            with open_weights(path, LAYOUT) as file:
                config = _config_beside(file.path)
        model = cls(config)
        model.load_safetensors(path)
        return model

    def is_redundant(self, name: str, file: WeightsFile) -> bool:
        """Tells whether a tensor is a copy of the tied embedding."""
        tied = name == "lm_head.weight" and self.config.tied
        return tied and torch.equal(file.read(name), file.read("embed_tokens.weight"))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), where ``config`` does not leave something out."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.input_layernorm = _norm(config.width, config)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = _norm(config.width, config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        """Maps the residual stream ``(B, T, D)`` to ``(B, T, D)``."""
        attended = self.self_attn(self.input_layernorm(x), rotary)
        x = x + attended if self.config.attention_residual else attended
        added = self.mlp(self.post_attention_layernorm(x))
        return x + added if self.config.mlp_residual else added


class Attention(nn.Module):
    """Causal attention of several heads with rotary positions; adjacent heads of q share one of k and v."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads, self.groups = config.heads, config.groups
        self.q_proj = nn.Linear(config.width, config.width, bias=False)
        self.k_proj = nn.Linear(config.width, config.groups * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.width, config.groups * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.width, config.width, bias=False)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity() for _ in "qk"
        )
        self.core = LinearAttention() if config.attention == "linear" else ScaledDotProduct()

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        """Maps ``(B, T, D)`` to ``(B, T, D)``."""
        q = rotary(self.q_norm(split_heads(self.q_proj(x), self.heads)))  # (B, H, T, head_dim)
        k = rotary(self.k_norm(split_heads(self.k_proj(x), self.groups)))  # (B, H_kv, T, head_dim)
        v = split_heads(self.v_proj(x), self.groups)
        return self.o_proj(merge_heads(self.core(q, k, v)))


class MLP(nn.Module):
    """down(act(gate x) * up x), or down(act(up x)) without a gate."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        if config.gate:
            self.gate_proj = nn.Linear(config.width, config.hidden, bias=False)
        self.up_proj = nn.Linear(config.width, config.hidden, bias=False)
        self.down_proj = nn.Linear(config.hidden, config.width, bias=False)
        self.activation = ACTIVATIONS[config.activation]()
        self.gated = config.gate

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``(B, T, D)`` to ``(B, T, D)``."""
        up = self.up_proj(x)  # (B, T, hidden)
        return self.down_proj(self.activation(self.gate_proj(x)) * up if self.gated else self.activation(up))


class Rotary(nn.Module):
    """Rotary positions (arXiv:2104.09864).

    At position t the entries i and i + head_dim / 2 are turned by the angle t theta^(-2 i / head_dim).

    Args:
        context: Number of positions.
        head_dim: Size of a head, even.
        theta: Base of the wavelengths.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, context: int, head_dim: int, theta: float) -> None:
        super().__init__()
        frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        angles = torch.outer(torch.arange(context, dtype=torch.float32), frequencies).repeat(1, 2)  # (T, head_dim)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``(B, H, T, head_dim)`` to the same, positions counted from 0."""
        cos, sin = (table[: x.shape[-2]].to(x.dtype) for table in (self.cos, self.sin))
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin


def _norm(size: int, config: LlamaConfig) -> nn.Module:
    return nn.RMSNorm(size, config.norm_eps) if config.norm else nn.Identity()


def _config_beside(path: Path) -> LlamaConfig:
    """Returns the shape that Hugging Face's ``config.json`` beside a file tells."""
    beside = path.parent / "config.json"
    try:
        found = dict(json.loads(beside.read_text(encoding="utf-8")))
        heads, width = int(found["num_attention_heads"]), int(found["hidden_size"])
        _refuse_strange(found, width // heads, beside)
        rope: dict[str, Any] = found.get("rope_parameters") or {}
        return LlamaConfig(
            layers=int(found["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(found.get("num_key_value_heads") or heads),
            width=width,
            hidden=int(found["intermediate_size"]),
            context=int(found["max_position_embeddings"]),
            vocabulary=int(found["vocab_size"]),
            tied=bool(found.get("tie_word_embeddings", False)),
            rope_theta=float(rope.get("rope_theta") or found.get("rope_theta") or 10000.0),
            norm_eps=float(found.get("rms_norm_eps") or 1e-6),
        )
    except OSError as error:
        raise UserError(f"weights: {beside} cannot be read ({error.strerror}); give network.* instead") from error
    except KeyError as error:
        raise UserError(f"weights: {beside} has no {error.args[0]}; it is not of a Llama") from error
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise UserError(f"weights: {beside} cannot be understood: {error}") from error


def _refuse_strange(found: dict[str, Any], head_dim: int, path: Path) -> None:
    """Raises where a ``config.json`` asks for what this model would silently compute otherwise."""
    scaling = found.get("rope_scaling") or found.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    for key, value, own in (
        ("model_type", found.get("model_type", "llama"), "llama"),
        ("hidden_act", found.get("hidden_act", "silu"), "silu"),
        ("attention_bias", found.get("attention_bias", False), False),
        ("mlp_bias", found.get("mlp_bias", False), False),
        ("head_dim", found.get("head_dim") or head_dim, head_dim),
        ("rope_type", kind, "default"),
    ):
        if value != own:
            raise UserError(f"weights: {path} has {key} {value!r}, but this Llama has {own!r} only")
