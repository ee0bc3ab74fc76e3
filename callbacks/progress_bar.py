"""ProgressBar: Lightning's rich bar with the loss and the headline measures, silent where there is no terminal."""

from __future__ import annotations

import math
import sys
from datetime import timedelta
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from rich.progress import TimeRemainingColumn

#: Metrics of geocont's modules that need no stage to be understood -> their names in the bar.
SHORT = {"train/loss": "loss", "val/accuracy": "accuracy", "val/perplexity": "perplexity"}
HEADLINES = ("loss", "coherence", "continuity")  # first, since what does not fit is left out from the end
FULL, MIDDLE = 140, 110  # columns of a terminal from which on there is room for everything, and for a short bar
SHORT_BAR, BAR = 10, 20


class ProgressBar(RichProgressBar):
    """Shows speed, losses and the headline measures: ``continuity`` (weights) and ``coherence`` (gradients).

    Each is the mean over projections of the measure that theory expects to be high: ``v1`` where a projection reads
    from the residual stream, ``u1`` where it writes to it. All of it stays on one line: narrow terminals get no bar,
    and other metrics are left out where they do not fit.

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

    def configure_columns(self, trainer: Trainer) -> list[Any]:
        """Returns the columns before the metrics, as many as leave room for those."""
        description, bar, batches, time, speed = super().configure_columns(trainer)
        width = self._width()
        if width < MIDDLE:
            return [description, batches, TimeRemainingColumn()]
        bar.bar_width = BAR if width >= FULL else SHORT_BAR
        return [description, bar, batches, time, speed] if width >= FULL else [description, bar, batches, time]

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Returns the values to show, headline measures first, without the loggers' version and what does not fit."""
        items = super().get_metrics(trainer, pl_module)
        items.pop("v_num", None)
        named = {SHORT.get(name, name): value for name, value in items.items()}
        ordered = {name: named[name] for name in HEADLINES if name in named} | named
        room, shown = self._room(trainer), {}
        for name, value in ordered.items():
            room -= len(
                f"{name}: {value:{self.theme.metrics_format}} " if isinstance(value, float) else f"{name}: {value} "
            )
            if room < -1:  # the last one needs no space after it
                break
            shown[name] = value
        return shown

    def _get_train_description(self, current_epoch: int) -> str:
        # Overrides a private method: with max_epochs of -1 Lightning writes "Epoch 0/-2".
        text = super()._get_train_description(current_epoch).replace("/-2", "")
        return f"{text:{len(self.validation_description)}}"

    def _width(self) -> int:
        return self._console.width if self._console is not None else 80

    def _room(self, trainer: Trainer) -> int:
        """Returns the characters that are left for metrics on a line."""
        width, tasks = self._width(), [] if self.progress is None else self.progress.tasks
        counts = [*(task.total or 0 for task in tasks), *trainer.num_val_batches]
        digits = max(2 if math.isinf(count) else len(str(int(count))) for count in (*counts, 0))
        used = len(self._get_train_description(trainer.current_epoch)) + len(" ") + 2 * digits + len("/ ")
        if width < MIDDLE:
            return width - used - len("00:00:00 ")
        elapsed = timedelta(seconds=int(max((task.elapsed or 0.0 for task in tasks), default=0.0)))
        used += SHORT_BAR + len(" ") + 2 * len(str(elapsed)) + len(" \N{BULLET}  ")
        return width - used if width < FULL else width - used - (BAR - SHORT_BAR) - len("1000.00it/s ")
