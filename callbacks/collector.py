"""The collector owns the row: what is measured at an optimizer step goes out once, together, under one step.

Row ``s`` describes the state after ``s`` updates: the loss and the gradient at W_s, and W_s itself. It reaches

- ``trainer.callback_metrics``, so that ModelCheckpoint and EarlyStopping can monitor every measure,
- ``trainer.progress_bar_metrics`` (headline measures only), so that any progress bar shows them,
- every logger of the trainer, in the same row as the losses that Lightning logs for this step where the logger knows
  unfinished rows (W&B, the run's local store), otherwise beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeGuard
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger, WandbLogger
from torch import Tensor

from callbacks.cadence import Cadence

STEP_KEY = "trainer/global_step"  # the step axis that WandbLogger uses


class Measuring(Protocol):
    """What the collector needs to know of a measuring callback."""

    cadence: Cadence


@dataclass
class Row:
    """The values of one optimizer step, before they go out."""

    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    media: dict[str, np.ndarray] = field(default_factory=dict)
    arrays: dict[str, Tensor] = field(default_factory=dict)


class Collector:
    """Gathers the values of one trainer's measuring callbacks; there is one for each trainer, see :meth:`of`."""

    _all: ClassVar[WeakKeyDictionary[Trainer, Collector]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self._members: WeakSet[Measuring] = WeakSet()
        self._own_cadence: int | None = None  # the trainer's log_every_n_steps while ours is in force
        self._row: Row | None = None  # collected in this step
        self._staged: int | None = None  # step of a row that loggers hold until Lightning completes it
        self._wandb_steps: dict[Logger, int] = {}  # W&B's own count of rows when that was staged

    @classmethod
    def of(cls, trainer: Trainer) -> Collector:
        """Returns the trainer's collector, which all its measuring callbacks share."""
        return cls._all.setdefault(trainer, cls())

    def join(self, member: Measuring) -> None:
        """Lets the collector know a measuring callback, so that its firings force a row."""
        self._members.add(member)

    def open_step(self, trainer: Trainer) -> None:
        """Makes Lightning write a row at the end of this step if a member fires; called at the start of a batch.

        Lightning logs losses every ``log_every_n_steps``. Set to 1 for a step that measures, losses, learning rates and
        measures share a row; the user's own cadence returns with the next step. 0 (log nothing) is respected.
        """
        self._commit(trainer)
        if self._own_cadence is None:
            self._own_cadence = trainer.log_every_n_steps  # type: ignore[attr-defined]
        fires = any(member.cadence.fires(trainer.global_step) for member in self._members)
        cadence = min(1, self._own_cadence) if fires else self._own_cadence
        trainer.log_every_n_steps = cadence  # type: ignore[attr-defined]

    def add(
        self,
        trainer: Trainer,
        metrics: Mapping[str, float],
        *,
        headline: Mapping[str, float] | None = None,
        media: Mapping[str, np.ndarray] | None = None,
        arrays: Mapping[str, Tensor] | None = None,
        skipped: int = 0,
        milliseconds: float = 0.0,
    ) -> None:
        """Adds values to the row of the current optimizer step.

        Args:
            trainer: Its ``global_step`` is the step of the row.
            metrics: Key -> number; what is not finite is dropped, NaN is never logged.
            headline: Short name -> number, shown in the progress bar.
            media: Key -> image ``(height, width, 3)`` of bytes, for loggers that take them (W&B).
            arrays: Key -> tensor, for loggers that keep arrays (the run's local store).
            skipped: Number of values that do not exist, summed over callbacks as ``measure/skipped``.
            milliseconds: What the measuring cost, summed as ``measure/milliseconds``.
        """
        if self._row is not None and self._row.step != trainer.global_step:
            self.flush(trainer)  # several optimizers step within a batch
        if self._row is None:
            self._row = Row(trainer.global_step)
        row = self._row
        new = {key: float(value) for key, value in metrics.items() if math.isfinite(value)}
        new["measure/skipped"] = row.metrics.get("measure/skipped", 0.0) + skipped
        new["measure/milliseconds"] = row.metrics.get("measure/milliseconds", 0.0) + milliseconds
        row.metrics.update(new)
        row.media.update(media or {})
        row.arrays.update(arrays or {})
        trainer.callback_metrics.update({key: torch.tensor(value) for key, value in new.items()})
        trainer.progress_bar_metrics.update(headline or {})

    def flush(self, trainer: Trainer) -> None:
        """Hands the collected row to the loggers; called at the end of a step, before Lightning logs its losses."""
        row, self._row = self._row, None
        if row is None:
            return
        self._commit(trainer)
        self._staged = row.step
        for logger in trainer.loggers:
            _stage(logger, row)
            if _is_plain_wandb(logger):
                self._wandb_steps[logger] = logger.experiment.step

    def close(self, trainer: Trainer) -> None:
        """Writes what is left and gives the trainer its own logging cadence back."""
        self.flush(trainer)
        self._commit(trainer)
        if self._own_cadence is not None:
            trainer.log_every_n_steps, self._own_cadence = self._own_cadence, None  # type: ignore[attr-defined]

    def _commit(self, trainer: Trainer) -> None:
        # Lightning completes no row where the user's module logs nothing, and none after the last step.
        if self._staged is not None:
            for logger in trainer.loggers:
                if hasattr(logger, "commit_staged"):
                    logger.commit_staged(self._staged)
                elif _is_plain_wandb(logger) and logger.experiment.step == self._wandb_steps.pop(logger, None):
                    logger.experiment.log({})  # W&B has counted no row since
        self._staged = None


def takes_images(trainer: Trainer) -> bool:
    """Tells whether any logger of the trainer shows images, so that none is drawn in vain."""
    return trainer.is_global_zero and any(isinstance(x, WandbLogger) and bool(x.experiment) for x in trainer.loggers)


def _stage(logger: Logger, row: Row) -> None:
    if row.arrays and hasattr(logger, "log_arrays"):
        logger.log_arrays(row.arrays, step=row.step)
    if hasattr(logger, "stage"):
        logger.stage({**row.metrics, **_media(logger, row)}, step=row.step)
    elif _is_plain_wandb(logger):  # W&B's own way of adding to a row that a later call completes
        logger.experiment.log({**row.metrics, **_media(logger, row), STEP_KEY: row.step}, commit=False)
    elif row.metrics:
        logger.log_metrics(row.metrics, step=row.step)


def _media(logger: Logger, row: Row) -> dict[str, Any]:
    """Returns the row's images as W&B takes them; nothing for loggers of numbers."""
    if not row.media or not isinstance(logger, WandbLogger) or not logger.experiment:
        return {}
    import wandb

    return {key: wandb.Image(pixels) for key, pixels in row.media.items()}


def _is_plain_wandb(logger: Logger) -> TypeGuard[WandbLogger]:
    return isinstance(logger, WandbLogger) and not hasattr(logger, "stage")
