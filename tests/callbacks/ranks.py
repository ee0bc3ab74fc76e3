"""Trainings with every callback on, on one rank or several, in a process of their own."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import callbacks
from geocont.measures.continuity import light_table
from geocont.models import GPT2Config
from geocont.modules import GPT2Module
from geocont.runs.store import RunStore

BATCH = 8


class Module(GPT2Module):
    """A small GPT-2 (q, k and v in one parameter) whose batches are all the same, whatever the number of ranks."""

    def _loader(self) -> DataLoader:
        tokens = torch.randint(31, (BATCH, 11), generator=torch.Generator().manual_seed(0)).repeat(8, 1)
        data, ranks = TensorDataset(tokens[:, :-1], tokens[:, 1:]), self.trainer.world_size
        sampler = DistributedSampler(data, ranks, self.trainer.global_rank, shuffle=False)
        return DataLoader(data, BATCH // ranks, sampler=sampler)

    train_dataloader = val_dataloader = _loader


class Leave(pl.Callback):
    """Leaves what each rank knows in the end, and does what a test asks for on the way."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self.folder, self.options = folder, options

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object) -> None:
        if trainer.global_step == self.options.get("kill_at") and trainer.global_rank == self.options["kill_rank"]:
            os.kill(os.getpid(), 9)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        owned = {
            name: sorted(getattr(callback, name))
            for callback in trainer.callbacks  # type: ignore[attr-defined]
            for name in ("_cumulative", "_initial")
            if hasattr(callback, name)
        }
        left = {"metrics": dict(trainer.callback_metrics), "owned": owned, "weights": pl_module.state_dict()}
        torch.save(left, self.folder / f"rank-{trainer.global_rank}.pt")


def every_callback(folder: Path) -> list[pl.Callback]:
    """Returns every callback that measures or keeps something, at every step."""
    return [
        callbacks.GradientCoherence(1, full_every_n_firings=1),
        callbacks.WeightContinuity(1, full_every_n_firings=1),
        callbacks.SoftmaxSaturation(1, sequences=99),
        callbacks.SpectralDynamics(1),
        callbacks.OptimizerMonitor(1),
        callbacks.StepMonitor(1),
        callbacks.StabilityGuard(every_n_steps=1, checkpoint_every_n_steps=2, action="stop"),
        callbacks.LastCheckpoint(2, str(folder / "checkpoints")),
        ModelCheckpoint(folder / "best", monitor="weight/v1/q", mode="max", every_n_train_steps=1),
        EarlyStopping("softmax/entropy/mean", patience=99),
    ]


def train(folder: Path, options: dict[str, Any]) -> None:
    """Trains once.

    Options are ``ranks``, ``steps``, ``resume`` (the folder of another training), ``strategy``, ``bad`` (a projection
    with a NaN), ``fail_rank`` (where continuity cannot be measured), ``kill_rank`` with ``kill_at``, ``validate``.
    """
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    network = GPT2Config(layers=3, heads=2, width=16, context=10, vocabulary=31)
    # (With its usual eps, the first step of Adam makes of the smallest gradients, which are rounding, large ones.)
    module = Module(network=network, optimizer=functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3))
    if "bad" in options:
        matrix = module.weight_map().projections[options["bad"]][1]
        matrix.of(dict(module.named_parameters())[matrix.parameter].data)[0, 0] = float("nan")
    trainer = pl.Trainer(
        max_steps=options["steps"],
        accelerator="cpu",
        strategy=options.get("strategy", "ddp_fork"),  # one rank as well, for forking needs a parent without threads
        devices=options["ranks"],
        use_distributed_sampler=False,
        callbacks=[*every_callback(folder), Leave(folder, options)],
        logger=RunStore(folder),
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=1,
        limit_val_batches=1,
    )
    resume = folder.parent / options["resume"] / "checkpoints/last.ckpt" if "resume" in options else None
    with pytest.MonkeyPatch.context() as patch:
        if "fail_rank" in options:
            patch.setattr("callbacks.continuity_rows.light_table", functools.partial(fails, options["fail_rank"]))
        trainer.fit(module, ckpt_path=resume, weights_only=True)
    if "validate" in options:
        trainer.validate(module, verbose=False)


def fails(rank: int, *args: Any) -> Any:
    """Stands for ``light_table`` on a rank that has no memory left."""
    if torch.distributed.get_rank() == rank:
        raise RuntimeError("no memory on this rank")
    return light_table(*args)


def run(folder: Path, **jobs: dict[str, Any]) -> tuple[int, str]:
    """Runs trainings one after the other; returns exit status and output.

    Raises:
        TimeoutExpired: They took longer than a minute, and a quarter for each; all that they started is killed.
    """
    command = [sys.executable, "-m", "tests.callbacks.ranks", str(folder), json.dumps(jobs)]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        cwd=Path(__file__).parents[2],
        env=alone,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        try:
            said, _ = process.communicate(timeout=60 + 15 * (len(jobs) - 1))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, said


if __name__ == "__main__":
    for name, options in json.loads(sys.argv[2]).items():
        train(Path(sys.argv[1], name), options)
