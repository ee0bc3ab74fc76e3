"""What the measuring callbacks add to a training step of the residual MLP of the paper, batch 32."""

from __future__ import annotations

import logging
import resource
import statistics
import time
import warnings
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch

from callbacks import GradientCoherence, WeightContinuity
from geocont.bench.timing import median_ratio
from geocont.data import Digits
from geocont.models import ResidualMLPConfig
from geocont.modules import ResidualMLPModule

NEVER = 10**9


def both(**cadence: Any) -> list[pl.Callback]:
    """Returns the two callbacks at a cadence."""
    return [GradientCoherence(**cadence), WeightContinuity(**cadence)]


#: Name -> (every_n_steps, what is on).
ARMS: dict[str, tuple[int | None, Any]] = {
    "none": (None, list),
    "default_cadence": (50, both),
    "light_every_step": (1, partial(both, every_n_steps=1, log_spaced=False, full_every_n_firings=NEVER)),
    "light_default_cadence": (50, partial(both, log_spaced=False, full_every_n_firings=NEVER)),
    "only_summing_gradients": (None, lambda: [GradientCoherence(every_n_steps=NEVER, log_spaced=False)]),
}


class Stopwatch(pl.Callback):
    """Times the training steps, without what comes before and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = self.within = 0.0

    def watch(self, callback: pl.Callback) -> None:
        """Adds up the time that a callback spends before each optimizer step, where the measuring happens."""
        hook = callback.on_before_optimizer_step

        def timed(trainer: pl.Trainer, *args: Any) -> None:
            started = time.perf_counter()
            hook(trainer, *args)
            if trainer.global_step > 0:
                self.within += time.perf_counter() - started

        callback.on_before_optimizer_step = timed  # type: ignore[assignment,method-assign]

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        """Starts at the second step: the first one allocates."""
        if trainer.global_step == 1:
            self.started = time.perf_counter()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stops after the last step."""
        self.seconds = time.perf_counter() - self.started


def measure_callbacks(steps: int, repeats: int) -> list[dict[str, Any]]:
    """Returns rows ``name ranks every_n_steps ms_per_step overhead_percent inside_percent peak_mb``.

    ``overhead_percent`` compares whole trainings, which on a shared machine differ by more than the callbacks cost;
    ``inside_percent`` is the time spent within the callbacks over the rest of the same training.

    Args:
        steps: Optimizer steps of each training.
        repeats: Rounds; each trains every arm once.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    seconds: dict[str, list[float]] = {name: [] for name in ARMS}
    inside: dict[str, list[float]] = {name: [] for name in ARMS}
    for _ in range(repeats):
        for name, (_, build) in ARMS.items():
            total, within = _train(build(), steps)
            seconds[name].append(total)
            inside[name].append(100 * within / (total - within))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return [
        {
            "name": name,
            "ranks": 1,
            "every_n_steps": every,
            "ms_per_step": 1e3 * statistics.median(seconds[name]) / (steps - 1),
            "overhead_percent": 100 * (median_ratio(seconds[name], seconds["none"]) - 1),
            "inside_percent": statistics.median(inside[name]),
            "peak_mb": peak,
        }
        for name, (every, _) in ARMS.items()
    ]


def _train(callbacks: list[pl.Callback], steps: int) -> tuple[float, float]:
    """Returns the seconds of a training, and those spent within the callbacks' own hook."""
    torch.manual_seed(0)
    stopwatch = Stopwatch()
    for callback in callbacks:
        stopwatch.watch(callback)
    trainer = pl.Trainer(
        max_steps=steps,
        max_epochs=-1,
        limit_val_batches=0,
        callbacks=[stopwatch, *callbacks],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(ResidualMLPModule(ResidualMLPConfig(), partial(torch.optim.Adam, lr=1e-3)), Digits(batch_size=32))
    return stopwatch.seconds, stopwatch.within
