"""LightningModule of Llama."""

from __future__ import annotations

import torch

from geocont.models import Llama, LlamaConfig
from geocont.modules.language import LanguageModule
from geocont.optim import OptimizerFactory, Schedule


class LlamaModule(LanguageModule):
    """Trains a Llama; logs ``train/loss``, ``val/loss`` and ``val/perplexity``, in nats a token.

    Args:
        network: Shape and ingredients of the network.
        optimizer: Any ``torch.optim`` class with its options, or ``geocont.optim.Composite`` for several rules.
        schedule: How learning rates change over the optimizer steps.
        weights: Safetensors file in Hugging Face's layout to start from, or a folder with ``model.safetensors``; by
            default the network starts from random weights.
        compile: Whether to compile the network with ``torch.compile``. Names of parameters do not change, nor do
            checkpoints.
    """

    def __init__(
        self,
        network: LlamaConfig = LlamaConfig(),  # noqa: B008  (a dataclass that is never changed)
        optimizer: OptimizerFactory = torch.optim.AdamW,
        schedule: Schedule = Schedule(),  # noqa: B008
        weights: str | None = None,
        compile: bool = False,
    ) -> None:
        model = Llama(network)
        if weights is not None:
            model.load_safetensors(weights)
        super().__init__(model, optimizer, schedule, compile)
