"""StepMonitor: learning rates and throughput, in the rows that the measures use."""

from __future__ import annotations

import time
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer

from callbacks.cadence import Cadence
from callbacks.collector import Collector
from callbacks.measuring import RowCallback


class StepMonitor(RowCallback):
    """Logs ``lr/{rule}`` of each parameter group and ``throughput/{samples,tokens}_per_second`` of all ranks together.

    A group's rule is its ``name``, or its number where it has none. Samples are counted along the first dimension of
    the batch's first tensor, tokens where that tensor holds whole numbers in two dimensions. Time in validation is left
    out.

    Args:
        every_n_steps: Log every so many optimizer steps.
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        super().__init__(Cadence(every_n_steps, log_spaced=False))
        self._samples = self._tokens = 0  # since the last firing
        self._since: float | None = None  # when that was
        self._validation_started = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Joins the trainer's collector and starts the clock at the first firing."""
        super().on_train_start(trainer, pl_module)
        self._since = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Counts the batch."""
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        tensor = _first_tensor(batch)
        if tensor is not None:
            self._samples += len(tensor)
            self._tokens += tensor.numel() if tensor.ndim == 2 and not tensor.is_floating_point() else 0

    def fire(self, trainer: Trainer, optimizer: Optimizer, full: bool) -> None:
        """Logs the learning rates of this update, and the speed since the last firing."""
        metrics = {f"lr/{group.get('name', i)}": float(group["lr"]) for i, group in enumerate(optimizer.param_groups)}
        now = time.perf_counter()
        if self._since is not None:
            seconds = now - self._since
            parts = self.exchange(trainer, lambda: (self._samples, self._tokens, seconds))
            samples, tokens, times = zip(*parts, strict=True)
            metrics["throughput/samples_per_second"] = sum(samples) / max(times)
            if sum(tokens):
                metrics["throughput/tokens_per_second"] = sum(tokens) / max(times)
        self._since, self._samples, self._tokens = now, 0, 0
        Collector.of(trainer).add(trainer, metrics)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stops the clock."""
        self._validation_started = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock again."""
        if self._since is not None:
            self._since += time.perf_counter() - self._validation_started


def _first_tensor(batch: Any) -> torch.Tensor | None:
    if isinstance(batch, torch.Tensor):
        return batch if batch.ndim else None
    parts = list(batch.values()) if isinstance(batch, dict) else batch
    if isinstance(parts, list | tuple):
        return next((found for part in parts if (found := _first_tensor(part)) is not None), None)
    return None
