"""GPT-2: learned positions, LayerNorm before each sublayer, one fused matrix for q, k and v."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from geocont.errors import UserError
from geocont.models.attention import LanguageModel, ScaledDotProduct, merge_heads, split_heads
from geocont.models.safetensors import Layout, WeightsFile, open_weights
from geocont.weights import WeightPattern

#: Hugging Face's files: matrices of linear layers in x out (Conv1D), and the causal masks of old files.
LAYOUT = Layout(
    prefix="transformer.",
    ignored=r"h\.\d+\.attn\.(masked_)?bias",
    transposed=r"h\.\d+\.(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight",
)
HEAD_DIM = 64  # of every published GPT-2


@dataclass
class GPT2Config:
    """Shape of a GPT-2; the defaults are those of the 124 million parameter model.

    Attributes:
        layers: Number of blocks, each of attention and MLP.
        heads: Attention heads of a block; they share the width between them.
        width: Size of the residual stream; the MLP is four times as wide.
        context: Largest number of tokens in a row, the number of learned positions.
        vocabulary: Number of tokens; may exceed that of the data.
        bias: Whether linear layers and LayerNorms have biases.
        dropout: Share dropped in training: of embeddings, attention weights, and what each sublayer adds.
        tied: Whether the head is the token embedding's matrix, or one of its own.
    """

    layers: int = 12
    heads: int = 12
    width: int = 768
    context: int = 1024
    vocabulary: int = 50257
    bias: bool = True
    dropout: float = 0.0
    tied: bool = True

    def __post_init__(self) -> None:
        for key in ("layers", "heads", "width", "context", "vocabulary"):
            if getattr(self, key) < 1:
                raise UserError(f"network.{key} must be at least 1, got {getattr(self, key)}")
        if self.width % self.heads:
            raise UserError(f"network.width must be a multiple of network.heads ({self.heads}), got {self.width}")
        if not 0 <= self.dropout < 1:
            raise UserError(f"network.dropout must be in [0, 1), got {self.dropout}")


class GPT2(LanguageModel):
    """GPT-2 with the parameter names of Hugging Face's, each matrix stored out x in."""

    config: GPT2Config
    layout = LAYOUT

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocabulary, config.width)
        self.wpe = nn.Embedding(config.context, config.width)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.width, bias=config.bias)
        if not config.tied:
            self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False)
        self._initialise()

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps tokens ``(B, T)`` int64 to logits ``(B, T, vocabulary)`` of the token after each.

        Raises:
            UserError: T exceeds the context.
        """
        self.check_context(tokens)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.wte(tokens) + self.wpe(positions))  # (B, T, D)
        for block in self.h:
            x = block(x)
        return F.linear(self.ln_f(x), self.wte.weight if self.config.tied else self.lm_head.weight)

    def weight_patterns(self) -> dict[str, WeightPattern]:
        """Returns where the six projections of each layer lie; q, k and v are rows of one parameter."""
        d, fused = self.config.width, r"h\.(\d+)\.attn\.c_attn\.weight"
        return {
            "q": WeightPattern(fused, rows=(0, d)),
            "k": WeightPattern(fused, rows=(d, 2 * d)),
            "v": WeightPattern(fused, rows=(2 * d, 3 * d)),
            "o": WeightPattern(r"h\.(\d+)\.attn\.c_proj\.weight"),
            "up": WeightPattern(r"h\.(\d+)\.mlp\.c_fc\.weight"),
            "down": WeightPattern(r"h\.(\d+)\.mlp\.c_proj\.weight"),
        }

    @torch.no_grad()
    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith(".bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                writes = name.endswith("c_proj.weight")  # to the residual stream, which sums 2 layers of them
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * self.config.layers) if writes else 0.02)

    @classmethod
    def from_safetensors(cls, path: str | Path, config: GPT2Config | None = None) -> GPT2:
        """Builds a model with the weights of a file in Hugging Face's layout.

        Args:
            path: The file, or a folder with ``model.safetensors``.
            config: Shape of the model. By default that of the file; the number of heads, which the file does not tell,
                is then that of the ``config.json`` beside it, otherwise width / 64.

        Raises:
            UserError: The file is not there, cannot be read, or does not fit the shape.
        """
        if config is None:
            with open_weights(path, LAYOUT) as file:
                config = _config_of(file)
        model = cls(config)
        model.load_safetensors(path)
        return model

    def check_file(self, file: WeightsFile) -> None:
        """Raises a UserError where ``config.json`` beside a file tells of another number of heads."""
        heads = _heads_beside(file.path)
        if heads not in (None, self.config.heads):
            raise UserError(
                f"network.heads is {self.config.heads}, but the weights {file.path} are of a model with {heads};"
                f" set --model.network.heads={heads}"
            )

    def is_redundant(self, name: str, file: WeightsFile) -> bool:
        """Tells whether a tensor is a copy of the tied embedding, or a bias of zeros where this model has none."""
        if name == "lm_head.weight":
            return self.config.tied and torch.equal(file.read(name), file.read("wte.weight"))
        without = not self.config.bias and name.endswith(".bias")
        return without and name.removesuffix("bias") + "weight" in self.state_dict() and not file.read(name).any()


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.width, bias=config.bias)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.width, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """Maps the residual stream ``(B, T, D)`` to ``(B, T, D)``."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Attention(nn.Module):
    """Causal attention of several heads, whose q, k and v come from one matrix ``(3 D, D)``."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.c_attn = nn.Linear(config.width, 3 * config.width, bias=config.bias)
        self.core = ScaledDotProduct(config.dropout)
        self.c_proj = nn.Linear(config.width, config.width, bias=config.bias)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``(B, T, D)`` to ``(B, T, D)``."""
        q, k, v = (split_heads(part, self.heads) for part in self.c_attn(x).chunk(3, dim=-1))  # (B, H, T, head_dim)
        return self.drop(self.c_proj(merge_heads(self.core(q, k, v))))


class MLP(nn.Module):
    """Two linear layers with GELU, in its tanh approximation, between them."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.width, 4 * config.width, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.width, config.width, bias=config.bias)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``(B, T, D)`` to ``(B, T, D)``."""
        return self.drop(self.c_proj(F.gelu(self.c_fc(x), approximate="tanh")))


def _config_of(file: WeightsFile) -> GPT2Config:
    missing = [name for name in ("wte.weight", "wpe.weight") if len(file.shapes.get(name, ())) != 2]
    if missing:
        raise UserError(f"weights: {file.path} has no matrix {missing[0]}; it is not a GPT-2")
    vocabulary, width = file.shapes["wte.weight"]
    return GPT2Config(
        layers=sum(name.endswith(".ln_1.weight") for name in file.shapes),
        heads=_heads_beside(file.path) or max(1, width // HEAD_DIM),
        width=width,
        context=file.shapes["wpe.weight"][0],
        vocabulary=vocabulary,
        bias="ln_f.bias" in file.shapes,
        tied="lm_head.weight" not in file.shapes or torch.equal(file.read("lm_head.weight"), file.read("wte.weight")),
    )


def _heads_beside(path: Path) -> int | None:
    """Returns the number of heads in Hugging Face's ``config.json`` beside a file, None where there is none."""
    try:
        heads = json.loads((path.parent / "config.json").read_text()).get("n_head")
    except (OSError, ValueError, AttributeError):
        return None
    return heads if isinstance(heads, int) else None
