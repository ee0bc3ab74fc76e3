"""LastCheckpoint: one file to resume from, never half written, never older than asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from callbacks.termination import Termination
from geocont.errors import UserError


class LastCheckpoint(Checkpoint):
    """Keeps ``last.ckpt``: written at the start, every so many optimizer steps, at the end, and on SIGTERM.

    Args:
        every_n_steps: Save every so many optimizer steps.
        dirpath: Folder of ``last.ckpt``; by default ``checkpoints`` in the run's directory.
    """

    def __init__(self, every_n_steps: int = 500, dirpath: str | None = None) -> None:
        super().__init__()
        if every_n_steps < 1:
            raise UserError(f"callbacks.last_checkpoint.every_n_steps must be at least 1, got {every_n_steps}")
        self.every_n_steps = every_n_steps
        self.dirpath = dirpath
        self._saved_step = -1
        self._resumed = False
        self._random_state: torch.Tensor | None = None
        self._termination = Termination()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves the initial state of a new run, so that there is something to resume from whenever it is killed."""
        self._termination.listen(trainer)
        self._resumed = trainer.ckpt_path is not None
        self._saved_step = trainer.global_step if self._resumed else -1
        if self._random_state is not None:  # restored here, since what is set up before may draw numbers
            torch.set_rng_state(self._random_state.cpu())
            self._random_state = None
        self._save(trainer)

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """Puts Lightning's counters right at the first batch after a resumption."""
        if self._resumed:
            self._resumed = False
            _repair_progress(trainer)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Saves at multiples of ``every_n_steps``, and where training stops within an epoch.

        At ``on_train_end`` Lightning counts an epoch that was broken off as complete: resumed from there, a run would
        leave out the rest of it.
        """
        ends_here = trainer.should_stop or trainer.global_step == trainer.max_steps
        ends_here |= self._termination.agreed(trainer)
        if ends_here or trainer.global_step % self.every_n_steps == 0:
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves the final state."""
        self._save(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Saves when asked to stop by SIGTERM, which Lightning raises between batches, where the state is whole."""
        if isinstance(exception, SIGTERMException):
            self._save(trainer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Saves the random state, so that dropout after a resumption is that of an uninterrupted run."""
        checkpoint["random_state"] = torch.get_rng_state()

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keeps the random state of a checkpoint until training starts."""
        self._random_state = checkpoint.get("random_state")

    def _save(self, trainer: Trainer) -> None:
        if trainer.global_step == self._saved_step or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        folder = Path(self.dirpath or Path(trainer.default_root_dir) / "checkpoints")
        trainer.save_checkpoint(folder / "last.ckpt")
        self._saved_step = trainer.global_step


def _repair_progress(trainer: Trainer) -> None:
    """Puts right what lightning 2.6 miscounts when it resumes; both are no-ops where it counts well.

    Resumed at an epoch's last batch, the next epoch is not counted as begun, and a second resumption from such an end
    goes on within the epoch that is over. Resumed before the first step, its own rows are a step late.
    """
    epochs: Any = trainer.fit_loop.epoch_progress
    for progress in (epochs.total, epochs.current):
        if progress.ready == progress.processed:
            progress.ready += 1
            progress.started += 1
    if trainer.global_step == 0:
        trainer.fit_loop.epoch_loop._batches_that_stepped = 0
