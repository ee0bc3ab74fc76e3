"""Checkpoints that a kill at any moment cannot spoil."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH

from geocont.errors import UserError


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its final place and moves it there in one step; reads tensors and plain values only.

    (Lightning's own way goes through fsspec, whose temporary file may lie on another disk, where moving is copying.)
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        """Saves to a local path; the old file stays whole until the new one is."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)

    def load_checkpoint(
        self, path: _PATH, map_location: Any | None = lambda storage, _: storage, weights_only: bool | None = True
    ) -> dict[str, Any]:
        """Loads tensors and plain values, whatever ``weights_only`` says: nothing in a checkpoint is ever executed.

        Raises:
            UserError: The file is not there or is not a checkpoint.
        """
        try:
            checkpoint = torch.load(path, map_location=map_location, weights_only=True)
        except FileNotFoundError as error:
            raise UserError(f"ckpt_path: {path} is not there") from error
        except Exception as error:
            reason = str(error).strip().split("\n")[0][:200]
            raise UserError(
                f"ckpt_path: {path} cannot be read as a checkpoint of tensors and plain values: {reason}"
            ) from error
        if not isinstance(checkpoint, dict) or not {"state_dict", "global_step"} <= checkpoint.keys():
            raise UserError(
                f"ckpt_path: {path} is not a checkpoint of a training: it has no state_dict and global_step"
            )
        return checkpoint
