"""One LightningModule for each model family, thin, over a shared base."""

from geocont.modules.base import GeoModule
from geocont.modules.gpt2 import GPT2Module
from geocont.modules.language import LanguageModule
from geocont.modules.llama import LlamaModule
from geocont.modules.residual_mlp import ResidualMLPModule

__all__ = ["GPT2Module", "GeoModule", "LanguageModule", "LlamaModule", "ResidualMLPModule"]
