"""LightningModule of the residual MLP."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from geocont.data.loader import UNSCORED
from geocont.errors import UserError
from geocont.models import ResidualMLP, ResidualMLPConfig
from geocont.modules.base import GeoModule
from geocont.modules.mean import ScoredMean
from geocont.optim import OptimizerFactory, Schedule


class ResidualMLPModule(GeoModule):
    """Trains a residual MLP as a classifier; logs ``train/loss``, ``val/loss`` and ``val/accuracy``.

    Args:
        network: Shape and ingredients of the network.
        optimizer: Any ``torch.optim`` class with its options, or ``geocont.optim.Composite`` for several rules.
        schedule: How learning rates change over the optimizer steps.
    """

    WEIGHTS: ClassVar[dict[str, str]] = {"hidden": r"hidden\.(\d+)\.linear\.weight"}

    def __init__(
        self,
        network: ResidualMLPConfig = ResidualMLPConfig(),  # noqa: B008  (a dataclass that is never changed)
        optimizer: OptimizerFactory = torch.optim.Adam,
        schedule: Schedule = Schedule(),  # noqa: B008
    ) -> None:
        super().__init__(optimizer, schedule)
        self.model: ResidualMLP = ResidualMLP(network)
        self.loss = nn.CrossEntropyLoss()
        self.accuracy = MulticlassAccuracy(network.classes, average="micro", ignore_index=UNSCORED)
        self.mean_loss = ScoredMean()

    def setup(self, stage: str) -> None:
        """Checks that the network fits the data, before anything is trained.

        Raises:
            UserError: The data module's ``inputs`` or ``classes`` differ from the network's.
        """
        data = getattr(self.trainer, "datamodule", None)
        for key, what in (("inputs", "features"), ("classes", "classes")):
            own, wanted = getattr(self.model.config, key), getattr(data, key, None)
            if wanted is not None and own != wanted:
                raise UserError(
                    f"network.{key} is {own}, but the data has {wanted} {what}; set --model.network.{key}={wanted}"
                )

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits ``(B, classes)`` of inputs ``(B, ...)``."""
        return self.model(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Returns the cross entropy of a batch."""
        x, y = batch
        loss = self.loss(self(x), y)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Adds a batch to ``val/loss`` and ``val/accuracy``."""
        self._evaluate("val", batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Adds a batch to ``test/loss`` and ``test/accuracy``."""
        self._evaluate("test", batch)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Returns the predicted classes ``(B,)``."""
        return self(batch[0]).argmax(-1)

    def _evaluate(self, stage: str, batch: tuple[Tensor, Tensor]) -> None:
        x, y = batch
        logits = self(x)
        self.accuracy(logits, y)
        total = F.cross_entropy(logits, y, ignore_index=UNSCORED, reduction="sum")
        self.mean_loss(total, (y != UNSCORED).sum())
        self.log(f"{stage}/loss", self.mean_loss, on_epoch=True, prog_bar=True)
        self.log(f"{stage}/accuracy", self.accuracy, on_epoch=True, prog_bar=True)
