"""LastCheckpoint: one file to resume from, never half written, never older than asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

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

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves the initial state of a new run, so that there is something to resume from whenever it is killed."""
        self._saved_step = trainer.global_step if trainer.ckpt_path else -1
        self._save(trainer)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Saves at multiples of ``every_n_steps``, and where training stops within an epoch.

        At ``on_train_end`` Lightning counts an epoch that was broken off as complete: resumed from there, a run would
        leave out the rest of it.
        """
        ends_here = trainer.should_stop or trainer.global_step == trainer.max_steps
        if ends_here or trainer.global_step % self.every_n_steps == 0:
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves the final state."""
        self._save(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Saves when asked to stop by SIGTERM, which Lightning raises between batches, where the state is whole."""
        if isinstance(exception, SIGTERMException):
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        if trainer.global_step == self._saved_step or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        folder = Path(self.dirpath or Path(trainer.default_root_dir) / "checkpoints")
        trainer.save_checkpoint(folder / "last.ckpt")
        self._saved_step = trainer.global_step
