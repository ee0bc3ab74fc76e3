"""OptimizerMonitor: how good the steps of Manifold Muon are, and how well its constraints hold."""

from __future__ import annotations

import time
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer

from callbacks.cadence import Cadence
from callbacks.collector import Collector
from callbacks.measuring import RowCallback

MEASURES = ("certified_ratio", "tangent_residual", "update_rms")


class OptimizerMonitor(RowCallback):
    """Logs ``optim/{measure}/{module}``, the mean over matrices, and ``..._worst``, and ``optim/skipped_steps``.

    Of the step that led to the weights of the row: ``certified_ratio`` (share of the best possible descent that the
    step certainly reached, 1 is optimal; worst is the least), ``tangent_residual`` (of the solver's answer before it
    was projected) and ``update_rms``; the optimizer knows them already. Of the weights themselves:
    ``manifold_residual``. Modules are ``attention`` and ``mlp``, or ``matrices``. The certified ratios of all matrices
    go to the run's local store.

    Args:
        every_n_steps: Log every so many optimizer steps.
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        super().__init__(Cadence(every_n_steps, log_spaced=False))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Joins the trainer's collector."""
        super().on_train_start(trainer, pl_module)
        if not any(_with_statistics(optimizer) for optimizer in trainer.optimizers):
            rank_zero_warn("OptimizerMonitor: there is no geocont.optim.ManifoldMuon here, so it logs nothing")

    def fire(self, trainer: Trainer, optimizer: Optimizer, full: bool) -> None:
        """Logs what the optimizer knows of its last step, and the residuals of its constraints."""
        started = time.perf_counter()
        optimizers = _with_statistics(optimizer)
        if not optimizers:
            return
        statistics = [_statistics(muon) for muon in optimizers]  # every rank gets here, for a rank knows its own only
        parts = self.exchange(trainer, lambda: (*_summary(optimizers, statistics), time.perf_counter() - started))
        if parts:
            metrics, arrays, _ = parts[0]
            milliseconds = 1e3 * max(seconds for *_, seconds in parts)
            Collector.of(trainer).add(trainer, metrics, arrays=arrays, milliseconds=milliseconds)


def _summary(optimizers: list[Any], statistics: list[list[Any]]) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Returns metrics and arrays of a row, from the statistics of each optimizer's matrices."""
    metrics: dict[str, float] = {}
    arrays: dict[str, torch.Tensor] = {}
    values: dict[str, list[float]] = {}
    for muon, matrices in zip(optimizers, statistics, strict=True):
        for matrix in matrices:
            for name in MEASURES:
                values.setdefault(f"{name}/{matrix.module}", []).append(getattr(matrix, name))
        for *_, module, residual in muon.manifold_residuals():
            values.setdefault(f"manifold_residual/{module}", []).append(residual)
    for name, found in values.items():
        metrics[f"optim/{name}"] = sum(found) / len(found)
        metrics[f"optim/{name}_worst"] = min(found) if name.startswith("certified") else max(found)
        if name.startswith("certified"):
            arrays[f"optim/{name}"] = torch.tensor(found)
    metrics["optim/skipped_steps"] = float(max(muon.skipped_steps for muon in optimizers))
    return metrics, arrays


def _statistics(optimizer: Any) -> list[Any]:
    """Returns what the last step did to every matrix, those that other ranks stepped among them."""
    if hasattr(optimizer, "gather_statistics"):
        return list(optimizer.gather_statistics())
    return list(optimizer.statistics())


def _with_statistics(optimizer: Any) -> list[Any]:
    """Returns the optimizers in an optimizer that tell of their last step."""
    inner = getattr(optimizer, "parts", {}).values()
    return [each for each in (optimizer, *inner) if hasattr(each, "statistics") and hasattr(each, "manifold_residuals")]
