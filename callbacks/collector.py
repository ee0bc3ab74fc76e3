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

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from callbacks.cadence import Cadence
from callbacks.media import Media, as_wandb, shows_media

STEP_KEY = "trainer/global_step"  # the step axis that WandbLogger uses
METRIC_BYTES, PACKED_BYTES = 300, 80  # of a metric beside its name, as Lightning sends it to another process
PIPE_BYTES = 48 * 1024  # that are surely taken by a pipe which nobody reads (64 KiB on Linux), with some room


class Measuring(Protocol):
    """What the collector needs to know of a measuring callback."""

    cadence: Cadence


@dataclass
class Row:
    """The values of one optimizer step, before they go out."""

    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    media: dict[str, Media] = field(default_factory=dict)
    arrays: dict[str, Tensor] = field(default_factory=dict)


class Guarding(Protocol):
    """What the collector asks of a callback that watches over the others' values."""

    def examine_update(self, trainer: Trainer, optimizer: Optimizer) -> None:
        """Looks at loss and gradients before anything is measured at this step."""

    def examine_row(self, trainer: Trainer, step: int, row: Row | None) -> None:
        """Looks at what was measured at a step that fires, before it goes out; None where nothing was."""


class Collector:
    """Gathers the values of one trainer's measuring callbacks; there is one for each trainer, see :meth:`of`."""

    _all: ClassVar[WeakKeyDictionary[Trainer, Collector]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self._members: WeakSet[Measuring] = WeakSet()
        self._guards: list[Guarding] = []  # in the order of the trainer's callbacks, the same on every rank
        self._update: int | None = None  # the step whose row the guards have not yet seen
        self._own_cadence: int | None = None  # the trainer's log_every_n_steps while ours is in force
        self._row: Row | None = None  # collected in this step
        self._keys: set[str] = set()  # all that it has put into trainer.callback_metrics
        self._staged: int | None = None  # step of a row that loggers hold until Lightning completes it
        self._wandb_steps: dict[Logger, int] = {}  # W&B's own count of rows when that was staged
        self._refused: set[str] = set()  # keys of media that W&B did not take, each of them said once

    @classmethod
    def of(cls, trainer: Trainer) -> Collector:
        """Returns the trainer's collector, which all its measuring callbacks share."""
        found = cls._all.get(trainer)
        if found is None:
            found = cls._all[trainer] = cls()
        return found

    def join(self, member: Measuring) -> None:
        """Lets the collector know a measuring callback, so that its firings force a row."""
        self._members.add(member)

    def join_guard(self, guard: Guarding) -> None:
        """Has a guard look at every update before it is measured, and at every row before it goes out."""
        if guard not in self._guards:
            self._guards.append(guard)

    def open_update(self, trainer: Trainer, optimizer: Optimizer) -> None:
        """Has the guards look at the loss and the gradients of an update, once, before anything is measured of it."""
        step = trainer.global_step
        if not self._guards or self._update == step:
            return
        self.examine(trainer)
        self._update = step
        for guard in self._guards:
            guard.examine_update(trainer, optimizer)

    def examine(self, trainer: Trainer) -> None:
        """Has the guards look at the row of the last update, once, where something fires at it.

        Every rank gets here for the same steps, whether it has a row or not: guards may exchange what they find.
        """
        step, self._update = self._update, None
        if step is not None and any(member.cadence.fires(step) for member in self._members):
            row = self._row if self._row is not None and self._row.step == step else None
            for guard in self._guards:
                guard.examine_row(trainer, step, row)

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
        media: Mapping[str, Media] | None = None,
        arrays: Mapping[str, Tensor] | None = None,
        skipped: int = 0,
        milliseconds: float = 0.0,
        step: int | None = None,
    ) -> None:
        """Adds values to the row of the current optimizer step.

        Args:
            trainer: Its ``global_step`` is the step of the row.
            metrics: Key -> number; what is not finite is dropped, NaN is never logged.
            headline: Short name -> number, shown in the progress bar.
            media: Key -> image or table, for loggers that take them (W&B).
            arrays: Key -> tensor, for loggers that keep arrays (the run's local store).
            skipped: Number of values that do not exist, summed over callbacks as ``measure/skipped``.
            milliseconds: What the measuring cost, summed as ``measure/milliseconds``: on several ranks the time of the
                slowest one, for which the others wait.
            step: The step of the row, where that is over already.
        """
        step = trainer.global_step if step is None else step
        if self._row is not None and self._row.step != step:
            self.flush(trainer)  # several optimizers step within a batch
        if self._row is None:
            self._row = Row(step)
        row = self._row
        new = {key: float(value) for key, value in metrics.items() if math.isfinite(value)}
        new["measure/skipped"] = row.metrics.get("measure/skipped", 0.0) + skipped
        new["measure/milliseconds"] = row.metrics.get("measure/milliseconds", 0.0) + milliseconds
        row.metrics.update(new)
        row.media.update(media or {})
        row.arrays.update(arrays or {})
        self._keys |= new.keys()
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
            _stage(logger, row, self._media(logger, row))
            if _is_plain_wandb(logger):
                self._wandb_steps[logger] = logger.experiment.step

    def _media(self, logger: Logger, row: Row) -> dict[str, Any]:
        """Returns the row's images and tables as W&B takes them; nothing for loggers of numbers."""
        found: dict[str, Any] = {}
        if row.media and shows_media(logger):
            for key, value in row.media.items():
                try:
                    found[key] = as_wandb(logger.experiment, key, value, row.step)  # type: ignore[attr-defined]
                except Exception as error:  # what cannot be shown never keeps numbers from any logger
                    self._refuse(key, error)
        return found

    def _refuse(self, key: str, error: Exception) -> None:
        if key not in self._refused:
            self._refused.add(key)
            rank_zero_warn(f"W&B does not get {key} of this training ({type(error).__name__}: {error})")

    def close(self, trainer: Trainer) -> None:
        """Writes what is left and gives the trainer its own logging cadence back."""
        self.flush(trainer)
        self._commit(trainer)
        if self._own_cadence is not None:
            trainer.log_every_n_steps, self._own_cadence = self._own_cadence, None  # type: ignore[attr-defined]
        if type(trainer.strategy.launcher).__name__ == "_MultiProcessingLauncher":
            self._fit_into_a_pipe(trainer)

    def _fit_into_a_pipe(self, trainer: Trainer) -> None:
        """Packs the metrics, and leaves out those of single layers (then all measures) where they are too many to send.

        Spawned and forked processes (``ddp_spawn``, ``ddp_fork``) send their metrics through a pipe that lightning 2.6
        reads after they have ended: with more in it than fits, they wait for each other for ever.
        """
        metrics = trainer.callback_metrics
        for droppable in ("/layer_", ""):
            own = [key for key in metrics if key in self._keys]
            size = METRIC_BYTES * (len(metrics) - len(own)) + PACKED_BYTES * len(own) + sum(map(len, metrics))
            for key in own if size > PIPE_BYTES else ():
                if droppable in key:
                    del metrics[key]
        own = [key for key in metrics if key in self._keys]
        if own:  # views of one tensor are saved as one
            metrics.update(zip(own, torch.stack([metrics[key] for key in own]).unbind(), strict=True))

    def _commit(self, trainer: Trainer) -> None:
        # Lightning completes no row where the user's module logs nothing, and none after the last step.
        if self._staged is not None:
            for logger in trainer.loggers:
                if hasattr(logger, "commit_staged"):
                    logger.commit_staged(self._staged)
                elif _is_plain_wandb(logger) and logger.experiment.step == self._wandb_steps.pop(logger, None):
                    logger.experiment.log({})  # W&B has counted no row since
        self._staged = None


def _stage(logger: Logger, row: Row, media: Mapping[str, Any]) -> None:
    if row.arrays and hasattr(logger, "log_arrays"):
        logger.log_arrays(row.arrays, step=row.step)
    if hasattr(logger, "stage"):
        logger.stage({**row.metrics, **media}, step=row.step)
    elif _is_plain_wandb(logger):  # W&B's own way of adding to a row that a later call completes
        logger.experiment.log({**row.metrics, **media, STEP_KEY: row.step}, commit=False)
    elif row.metrics:
        logger.log_metrics(row.metrics, step=row.step)


def _is_plain_wandb(logger: Logger) -> TypeGuard[WandbLogger]:
    return isinstance(logger, WandbLogger) and not hasattr(logger, "stage")
