"""ProgressBar: Lightning's rich bar with the loss and the headline measures, silent where there is no terminal."""

from __future__ import annotations

import sys
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar


class ProgressBar(RichProgressBar):
    """Shows speed, losses and the headline measures: ``continuity`` (weights) and ``coherence`` (gradients).

    Each is the mean over projections of the measure that theory expects to be high: ``v1`` where a projection reads
    from the residual stream, ``u1`` where it writes to it.

    Args:
        refresh_rate: Redraw every so many batches.
    """

    def __init__(self, refresh_rate: int = 20) -> None:
        super().__init__(refresh_rate=refresh_rate)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stays silent where the output is not a terminal: a log file wants lines, not redrawings."""
        if not sys.stdout.isatty():
            self.disable()
        super().setup(trainer, pl_module, stage)

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Returns the values to show, without the loggers' version."""
        items = super().get_metrics(trainer, pl_module)
        items.pop("v_num", None)
        return items
