"""Someone else's Lightning project: a small model that knows nothing of geocont."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

PATTERNS = {"hidden": r"blocks\.(\d+)\.weight"}
WIDTH, DEPTH = 20, 5


class Stranger(pl.LightningModule):
    def __init__(self, logs: bool = True, lr: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 3)
        self.logs, self.lr = logs, lr

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).relu()
        return self.head(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        if self.logs:
            self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val/loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr)


def loader(batch_size: int = 8, samples: int = 64) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, WIDTH, generator=generator)
    return DataLoader(TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()), batch_size=batch_size)


class Rows(Logger):
    """Keeps what a logger is given, as rows of (step, metrics)."""

    name, version = "rows", "0"

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, Any]]] = []

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def measured(self, key: str) -> dict[int, float]:
        return {step: row[key] for step, row in self.rows if key in row and step is not None}


def train(
    module: pl.LightningModule,
    callbacks: list[pl.Callback],
    steps: int = 4,
    batch_size: int = 8,
    data: Callable[[int], DataLoader] = loader,
    **options: Any,
) -> tuple[pl.Trainer, Rows]:
    """Trains on the processor without anything on the terminal or the disk."""
    rows = Rows()
    defaults = {"max_steps": steps, "logger": rows, "accelerator": "cpu", "enable_checkpointing": False}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "limit_val_batches": 0}
    checkpoint = options.pop("ckpt_path", None)
    trainer = pl.Trainer(**(defaults | quiet | options), callbacks=callbacks)
    trainer.fit(module, data(batch_size), data(64), ckpt_path=checkpoint, weights_only=True)
    return trainer, rows
