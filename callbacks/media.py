"""Images and tables on their way to Weights & Biases: plain data until a logger that shows them takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger, WandbLogger


@dataclass(frozen=True)
class Table:
    """Rows under named columns.

    Attributes:
        columns: Their names.
        rows: A number, text or truth value for each column.
    """

    columns: tuple[str, ...]
    rows: Sequence[tuple[int | float | str | bool, ...]]


Media = np.ndarray | Table
"""An image, ``(height, width, 3)`` of bytes, or a table."""


def takes_media(trainer: Trainer) -> bool:
    """Tells whether any logger of the trainer shows images and tables, so that none is made in vain."""
    return trainer.is_global_zero and any(map(shows_media, trainer.loggers))


def shows_media(logger: Logger) -> bool:
    """Tells whether a logger shows images and tables."""
    return isinstance(logger, WandbLogger) and bool(logger.experiment)


def as_wandb(run: Any, key: str, value: Media, step: int) -> Any:
    """Returns an image or a table as W&B's own object, its file written to the run's directory.

    Left to W&B's ``log``, a table would be an artifact as well: a request to the server amid the training, a version of
    its own each time, and a second copy in the user's home, without which `wandb sync` of a run that was copied to
    another machine complains.

    Args:
        run: The W&B run.
        key: The key it will be logged under.
        value: The image or the table.
        step: The optimizer step, which becomes part of the file's name.
    """
    import wandb

    found: Any
    if isinstance(value, Table):
        found = wandb.Table(columns=list(value.columns), data=[list(row) for row in value.rows])
    else:
        found = wandb.Image(value)
    found.bind_to_run(run, key, step)
    return found
