"""What the LightningModules of all language models share: loss, exact evaluation, checks and compilation."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from geocont.data.loader import UNSCORED
from geocont.errors import UserError
from geocont.models import LanguageModel
from geocont.modules.base import GeoModule
from geocont.modules.mean import ScoredMean
from geocont.optim import OptimizerFactory, Schedule
from geocont.weights import WeightPattern


class LanguageModule(GeoModule):
    """Trains a network to predict tokens; logs ``train/loss``, ``val/loss`` and ``val/perplexity``, in nats a token.

    A batch is (tokens, targets), both int64 ``(B, T)``; a target of -100 is not scored. ``val/loss`` is the mean over
    all scored tokens, ``val/tokens`` of them, however they are spread over batches and ranks, and ``val/perplexity``
    its exponential. Where the data module has ``tokens_per_word(split)``, ``val/perplexity_per_word`` is logged too,
    which does not depend on the tokenizer.

    Args:
        model: Maps tokens ``(B, T)`` to logits ``(B, T, vocabulary)``.
        optimizer: Any ``torch.optim`` class with its options, or ``geocont.optim.Composite`` for several rules.
        schedule: How learning rates change over the optimizer steps.
        compile: Whether to compile the network with ``torch.compile``. Names of parameters do not change, nor do
            checkpoints.
    """

    model: LanguageModel

    def __init__(
        self, model: LanguageModel, optimizer: OptimizerFactory, schedule: Schedule, compile: bool = False
    ) -> None:
        super().__init__(optimizer, schedule)
        self.model = model
        self.compiled = compile
        self.mean_loss = ScoredMean()

    def weight_patterns(self) -> Mapping[str, str | WeightPattern]:
        """Returns the patterns of the network."""
        return self.model.weight_patterns()

    def setup(self, stage: str) -> None:
        """Checks that the network fits the data, before anything is trained, and marks it for compilation.

        Raises:
            UserError: The data module's ``vocabulary_size`` or ``context`` exceeds the network's.
        """
        data = getattr(self.trainer, "datamodule", None)
        for key, wanted_key, what in (
            ("vocabulary", "vocabulary_size", "different tokens"),
            ("context", "context", "tokens a row"),
        ):
            own, wanted = getattr(self.model.config, key), getattr(data, wanted_key, None)
            if wanted is not None and own < wanted:
                raise UserError(
                    f"network.{key} is {own}, but the data has {wanted} {what}; set --model.network.{key}={wanted}"
                )
        if self.compiled:
            self.model.compile()  # in place, on the first call: no wrapper that would enter the parameters' names

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the logits ``(B, T, vocabulary)`` of tokens ``(B, T)``."""
        return self.model(tokens)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Returns the mean cross entropy of the scored tokens of a batch; 0 if there are none."""
        total, tokens = self._losses(batch)
        loss = total / tokens.clamp(min=1)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def on_validation_epoch_start(self) -> None:
        """Starts the sums of ``val/loss``."""
        self.mean_loss.reset()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Adds a batch to ``val/loss`` and ``val/perplexity``."""
        self.mean_loss.update(*self._losses(batch))

    def on_validation_epoch_end(self) -> None:
        """Logs ``val/loss`` and ``val/perplexity``."""
        self._log_mean("val")

    def on_test_epoch_start(self) -> None:
        """Starts the sums of ``test/loss``."""
        self.mean_loss.reset()

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Adds a batch to ``test/loss`` and ``test/perplexity``."""
        self.mean_loss.update(*self._losses(batch))

    def on_test_epoch_end(self) -> None:
        """Logs ``test/loss`` and ``test/perplexity``."""
        self._log_mean("test")

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Returns the likeliest next token after each, ``(B, T)``."""
        return self(batch[0]).argmax(-1)

    def _losses(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns the sum of the cross entropies of the scored tokens, in float32, and their number."""
        x, y = batch
        logits = self(x).float().flatten(0, 1)  # (B T, vocabulary)
        y = y.flatten()
        return F.cross_entropy(logits, y, ignore_index=UNSCORED, reduction="sum"), (y != UNSCORED).sum()

    def _log_mean(self, stage: str) -> None:
        loss = self.mean_loss.compute()  # over all ranks already; sync_dist then averages equal values
        self.log(f"{stage}/loss", loss, prog_bar=True, sync_dist=True)
        self.log(f"{stage}/perplexity", loss.exp(), prog_bar=True, sync_dist=True)
        self.log(f"{stage}/tokens", self.mean_loss.count.float(), sync_dist=True, reduce_fx="sum")
        per_word = getattr(getattr(self.trainer, "datamodule", None), "tokens_per_word", None)
        if per_word is not None:
            words = (loss * per_word("validation" if stage == "val" else stage)).exp()
            self.log(f"{stage}/perplexity_per_word", words, sync_dist=True)
