"""The model families: plain ``nn.Module`` and a configuration dataclass each, no Lightning."""

from geocont.models.attention import LanguageModel, ScaledDotProduct
from geocont.models.gpt2 import GPT2, GPT2Config
from geocont.models.llama import Llama, LlamaConfig
from geocont.models.residual_mlp import ResidualMLP, ResidualMLPConfig

__all__ = [
    "GPT2",
    "GPT2Config",
    "LanguageModel",
    "Llama",
    "LlamaConfig",
    "ResidualMLP",
    "ResidualMLPConfig",
    "ScaledDotProduct",
]
