"""What Lightning and geocont add to a plain PyTorch loop: the Llama of conf/experiment/llama/cpu.yaml, step by step."""

from __future__ import annotations

import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F

from callbacks import LastCheckpoint, StepMonitor
from geocont.bench.timing import median_ratio
from geocont.data import Text
from geocont.errors import UserError
from geocont.models import Llama, LlamaConfig
from geocont.modules import LlamaModule
from geocont.optim import Schedule
from geocont.runs.store import RunStore

WARM_UP = 3  # steps before those that are timed
NETWORK = LlamaConfig(layers=8, heads=4, width=128, hidden=344, context=128, vocabulary=257)
SCHEDULE = Schedule(shape="cosine", warmup_steps=50, floor=0.1)
ADAMW = partial(torch.optim.AdamW, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
CLIP = 1.0


def measure_training(steps: int, repeats: int) -> list[dict[str, Any]]:
    """Returns rows ``name ranks every_n_steps ms_per_step overhead_percent``.

    ``plain`` is a loop of a few lines; ``lightning`` a Trainer with nothing but the module; ``geocont`` a Trainer as
    ``geocont fit`` has it with measuring callbacks off: checkpoints, step monitor and the run's local store. All train
    the same model on the same batches; ``overhead_percent`` is the median over rounds, against ``plain`` of the same.

    Args:
        steps: Optimizer steps of each training that are timed.
        repeats: Rounds; each trains every arm once.

    Raises:
        UserError: A number is less than 1.
    """
    for option, value in (("--steps", steps), ("--repeats", repeats)):
        if value < 1:
            raise UserError(f"{option} must be at least 1, got {value}")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    data = Text("stdlib", tokenizer="bytes", context=NETWORK.context, batch_size=8, seed=0)
    data.setup("fit")
    arms: dict[str, Callable[[], float]] = {
        "plain": partial(_plain, data, steps),
        "lightning": partial(_trainer, data, steps, False),
        "geocont": partial(_trainer, data, steps, True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(repeats):
        for name, arm in arms.items():
            seconds[name].append(arm())
    return [
        {
            "name": name,
            "ranks": 1,
            "every_n_steps": None,
            "ms_per_step": 1e3 * statistics.median(taken) / steps,
            "overhead_percent": 100 * (median_ratio(taken, seconds["plain"]) - 1),
        }
        for name, taken in seconds.items()
    ]


def _plain(data: Text, steps: int) -> float:
    """Returns the seconds of a training without Lightning."""
    torch.manual_seed(0)
    model = Llama(NETWORK)
    optimizer = ADAMW(model.parameters())
    scheduler = SCHEDULE.build(optimizer, steps + WARM_UP)
    batches = iter(data.train_dataloader())
    started = 0.0
    for step in range(steps + WARM_UP):
        if step == WARM_UP:
            started = time.perf_counter()
        x, y = next(batches)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
    return time.perf_counter() - started


class Stopwatch(pl.Callback):
    """Times the steps after the warm-up."""

    seconds = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        """Starts after the warm-up."""
        if trainer.global_step == WARM_UP:
            self._started = time.perf_counter()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stops after the last step."""
        self.seconds = time.perf_counter() - self._started


def _trainer(data: Text, steps: int, whole: bool) -> float:
    """Returns the seconds of a training by Lightning, with what ``geocont fit`` adds if it is to be ``whole``."""
    torch.manual_seed(0)
    stopwatch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        callbacks = [StepMonitor(), LastCheckpoint(dirpath=str(Path(folder, "checkpoints")))] if whole else []
        trainer = pl.Trainer(
            max_steps=steps + WARM_UP,
            max_epochs=-1,
            limit_val_batches=0,
            log_every_n_steps=10,
            gradient_clip_val=CLIP,
            callbacks=[stopwatch, *callbacks],
            logger=[RunStore(folder)] if whole else False,
            accelerator="cpu",
            default_root_dir=folder,
            enable_checkpointing=whole,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(LlamaModule(NETWORK, ADAMW, SCHEDULE), data)
    return stopwatch.seconds
