"""What the measuring callbacks add to a training step: of the paper's residual MLP, and of the small GPT-2 on ranks."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import resource
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import Logger

from callbacks import (
    GradientCoherence,
    OptimizerMonitor,
    SoftmaxSaturation,
    SpectralDynamics,
    StabilityGuard,
    WeightContinuity,
    switch_of,
)
from geocont.bench.timing import median_ratio
from geocont.data import Digits, Text
from geocont.errors import UserError
from geocont.models import GPT2Config, ResidualMLPConfig
from geocont.modules import GPT2Module, ResidualMLPModule
from geocont.optim import AdamWOptions, ModuleWise, MuonOptions
from geocont.runs.store import RunStore
from geocont.runs.wandb import WandbRunLogger

NEVER = 10**9
LOGGING = "logging"  # the name of what the loggers take
Arm = tuple[int | None, Callable[[], list[pl.Callback]]]


@dataclass(frozen=True)
class Workload:
    """A training that is measured.

    Attributes:
        module: Builds the LightningModule.
        data: Builds the data module.
        arms: Name -> (every_n_steps, what is on).
        steps: Optimizer steps of a training by default.
    """

    module: Callable[[], pl.LightningModule]
    data: Callable[[], pl.LightningDataModule]
    arms: dict[str, Arm]
    steps: int


def _continuity(**cadence: Any) -> list[pl.Callback]:
    return [GradientCoherence(**cadence), WeightContinuity(**cadence)]


def _all(**cadence: Any) -> list[pl.Callback]:
    """Returns every measuring callback, at its own default cadence or at another."""
    log_spaced: dict[str, Any] = {} if not cadence else {"log_spaced": False}
    others = [SpectralDynamics(**cadence), OptimizerMonitor(**cadence)]
    return [
        *_continuity(**cadence, **log_spaced),
        *others,
        SoftmaxSaturation(**cadence, **log_spaced),
        StabilityGuard(**cadence, checkpoint_every_n_steps=None),
    ]


def _gpt2() -> GPT2Module:
    """Returns the model of conf/experiment/gpt2/hetero.yaml with cpu.yaml."""
    network = GPT2Config(layers=4, heads=4, width=128, context=128, vocabulary=257, bias=False)
    muon, adamw = MuonOptions(lr=0.05, start="orthonormal"), AdamWOptions(lr=3e-3)
    return GPT2Module(network, partial(ModuleWise, assignment="hetero", fused="split", muon=muon, adamw=adamw))


WORKLOADS = {
    "mlp": Workload(
        lambda: ResidualMLPModule(ResidualMLPConfig(), partial(torch.optim.Adam, lr=1e-3)),
        lambda: Digits(batch_size=32),
        {
            "none": (None, list),
            "default_cadence": (50, _continuity),
            "light_every_step": (
                1,
                partial(_continuity, every_n_steps=1, log_spaced=False, full_every_n_firings=NEVER),
            ),
            "light_default_cadence": (50, partial(_continuity, log_spaced=False, full_every_n_firings=NEVER)),
            "only_summing_gradients": (None, lambda: [GradientCoherence(every_n_steps=NEVER, log_spaced=False)]),
        },
        1000,  # more than two periods of the full table
    ),
    "gpt2": Workload(
        _gpt2,
        lambda: Text("stdlib", tokenizer="bytes", context=128, batch_size=16, seed=0),
        {
            "none": (None, list),
            "default_cadence": (50, _all),
            "every_step": (1, partial(_all, every_n_steps=1)),
        },
        320,  # the length of its experiment
    ),
}


class Stopwatch(pl.Callback):
    """Times the training steps after the first, and what of them each callback and the logging take; rank 0 leaves it
    in a file.

    Time within a part that another part calls (a callback hands its row to the loggers) counts for the inner one only.

    Args:
        path: The file.
        callbacks: The callbacks to watch, named as their switches are.
        loggers: The loggers to watch, together ``logging``.
    """

    HOOKS = ("on_train_batch_start", "on_before_backward", "on_before_optimizer_step", "on_train_batch_end")
    LOGS = ("stage", "commit_staged", "log_metrics", "log_arrays")

    def __init__(self, path: Path, callbacks: Sequence[pl.Callback], loggers: Sequence[Logger]) -> None:
        super().__init__()
        self.path, self.started = path, 0.0
        self.saturation = [callback for callback in callbacks if isinstance(callback, SoftmaxSaturation)]
        parts = [*(switch_of(type(callback)) for callback in callbacks), *([LOGGING] if loggers else [])]
        self.within: dict[str, float] = dict.fromkeys(parts, 0.0)
        self._inner = [0.0]  # for each part that is under way, the seconds of the parts within
        for callback in callbacks:
            self._watch(switch_of(type(callback)), callback, self.HOOKS)
        for logger in loggers:
            self._watch(LOGGING, logger, self.LOGS)

    def _watch(self, name: str, part: Any, methods: Iterable[str]) -> None:
        for method in (getattr(part, each) for each in methods if hasattr(part, each)):
            setattr(part, method.__name__, partial(self._timed, name, method))

    def _timed(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        self._inner.append(0.0)
        try:
            return method(*args, **kwargs)
        finally:
            seconds, inner = time.perf_counter() - started, self._inner.pop()
            self._inner[-1] += seconds
            if self.started:
                self.within[name] += seconds - inner

    def on_before_zero_grad(self, trainer: pl.Trainer, *args: Any) -> None:
        """Adds what attention was watched for within the forward pass, which has just ended."""
        for callback in self.saturation:
            if self.started and callback._watched_step == trainer.global_step:
                self.within[switch_of(type(callback))] += callback._watch.seconds

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        """Starts at the second step: the first one allocates."""
        if trainer.global_step == 1:
            self.started = time.perf_counter()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stops after the last step (the callbacks' own ends come later)."""
        seconds = time.perf_counter() - self.started
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        if trainer.is_global_zero:
            self.path.write_text(json.dumps({"seconds": seconds, "within": self.within, "peak": peak}))


def measure_callbacks(model: str, ranks: Sequence[int], steps: int | None, repeats: int) -> list[dict[str, Any]]:
    """Returns rows ``name ranks every_n_steps ms_per_step overhead_percent inside_percent peak_mb``.

    ``overhead_percent`` compares whole trainings, which on a shared machine differ by more than the callbacks cost;
    ``inside_percent`` is the time spent within the callbacks and loggers over the rest of the same training. A row
    ``ARM/switch`` for each callback, and ``ARM/logging``, say how that divides. ``peak_mb`` is the largest memory of
    rank 0 up to then, the interpreter included. One process logs as ``geocont fit`` does, to the local store and to an
    offline W&B run; several log nothing.

    Args:
        model: ``mlp`` or ``gpt2``.
        ranks: Numbers of processes, each of one thread, on a global batch that grows with them; 1 is this process.
        steps: Optimizer steps of each training; by default those of the model's workload.
        repeats: Rounds; each trains every arm once.

    Raises:
        UserError: A number is too small, or there is no such model.
    """
    if model not in WORKLOADS:
        raise UserError(f"--model must be one of {', '.join(WORKLOADS)}, got {model!r}")
    workload = WORKLOADS[model]
    steps = workload.steps if steps is None else steps
    for option, value, least in (("--ranks", min(ranks), 1), ("--steps", steps, 2), ("--repeats", repeats, 1)):
        if value < least:
            raise UserError(f"{option} must be at least {least}, got {value}")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    rows = []
    for count in ranks:
        found: dict[str, list[Training]] = {name: [] for name in workload.arms}
        for _ in range(repeats):
            for name, (_, build) in workload.arms.items():
                found[name].append(_train(workload, build(), steps, count))
        for name, (every, _) in workload.arms.items():
            rows += _rows(name, found[name], found["none"], {"ranks": count, "every_n_steps": every}, steps - 1)
    return rows


def _rows(
    name: str, runs: list[Training], without: list[Training], columns: dict[str, Any], steps: int
) -> list[dict[str, Any]]:
    """Returns the row of an arm and those of its parts."""
    seconds = [run.seconds for run in runs]
    whole = {"name": name, **columns, "ms_per_step": 1e3 * statistics.median(seconds) / steps}
    whole["overhead_percent"] = 100 * (median_ratio(seconds, [run.seconds for run in without]) - 1)
    whole["inside_percent"] = statistics.median(run.percent(sum(run.within.values())) for run in runs)
    rows = [whole | {"peak_mb": max(run.peak for run in runs)}]
    for part in runs[0].within:
        row = {"name": f"{name}/{part}", **columns}
        row["ms_per_step"] = 1e3 * statistics.median(run.within[part] for run in runs) / steps
        row["overhead_percent"] = None
        row["inside_percent"] = statistics.median(run.percent(run.within[part]) for run in runs)
        rows.append(row | {"peak_mb": None})
    return rows


@dataclass(frozen=True)
class Training:
    """What a stopwatch has found: seconds of the training, seconds within each part, memory in MB."""

    seconds: float
    within: dict[str, float]
    peak: float

    def percent(self, seconds: float) -> float:
        """Returns seconds as a share of the training without callbacks and loggers, in percent."""
        return 100 * seconds / (self.seconds - sum(self.within.values()))


def _train(workload: Workload, callbacks: list[pl.Callback], steps: int, ranks: int) -> Training:
    torch.manual_seed(0)
    several: dict[str, Any] = {"strategy": "ddp_fork", "devices": ranks} if ranks > 1 else {"devices": 1}
    threads = torch.get_num_threads()
    if ranks > 1:
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        loggers: list[Logger] = []
        if ranks == 1:
            wandb = WandbRunLogger(mode="offline", run_dir=folder)
            stack.callback(wandb.finish)
            loggers = [RunStore(folder), wandb]
        stopwatch = Stopwatch(Path(folder, "found.json"), callbacks, loggers)
        trainer = pl.Trainer(
            max_steps=steps,
            max_epochs=-1,
            limit_val_batches=0,
            callbacks=[stopwatch, *callbacks],
            accelerator="cpu",
            logger=loggers,
            log_every_n_steps=10,
            default_root_dir=folder,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **several,
        )
        with contextlib.redirect_stdout(io.StringIO()):  # the optimizer's table, each time
            trainer.fit(workload.module(), workload.data())
        torch.set_num_threads(threads)
        return Training(**json.loads(stopwatch.path.read_text()))
