"""What a step of Manifold Muon costs where ranks share the matrices, and where each of them steps them all."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn import Parameter

from geocont.errors import UserError
from geocont.optim import ManifoldMuon

#: Process that waits this long for another one gives up.
PATIENCE = timedelta(minutes=5)
#: Steps before those that are timed: they make the state, and start what threads there are.
WARM_UP = 1


def measure_ddp(ranks: list[int] | None, layers: int, width: int, repeats: int) -> list[dict[str, Any]]:
    """Returns rows of name, ranks, every_n_steps, ms_per_step, overhead_percent and peak_mb.

    The matrices are those of ``layers`` layers of GPT-2: fused attention (3 width x width) and its output on Stiefel,
    the MLP (4 width x width and back) on DGram. For each number of ranks there are three arms: ``single``, one process
    that has a thread for each rank; ``replicated``, a process of one thread for each rank, which steps every matrix;
    ``sharded``, the same processes, which share the matrices and exchange the results over gloo's loopback. The arms
    take turns in the same processes. ``ms_per_step`` is the median time until the last rank is done,
    ``overhead_percent`` the median excess over ``single`` of the same round, ``peak_mb`` the optimizer's state on the
    rank that has most of it. Threads sleep while they wait for each other (OMP_WAIT_POLICY, unless it is set): else
    those of ``single`` take tens of times as long on a machine that others use too.

    Args:
        ranks: Numbers of ranks; by default 1, 2, 4 ... up to the number of cores, and always 1 and 2.
        layers: Number of layers.
        width: Of the model.
        repeats: Rounds.

    Raises:
        UserError: A number is less than 1.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    counts = ranks or [count for count in (1, 2, 4, 8) if count <= max(2, cores)]
    for option, least in (("--ranks", min(counts)), ("--layers", layers), ("--width", width), ("--repeats", repeats)):
        if least < 1:
            raise UserError(f"{option} must be at least 1, got {least}")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    rows = []
    for count in counts:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_rank, (count, layers, width, repeats, folder), nprocs=count)
            rows += torch.load(Path(folder, "rows.pt"))
    return rows


def _rank(rank: int, ranks: int, layers: int, width: int, repeats: int, folder: str) -> None:
    """Runs one process; rank 0 leaves the rows in the folder."""
    dist.init_process_group("gloo", f"file://{folder}/store", PATIENCE, rank=rank, world_size=ranks)
    arms = {name: _optimizer(layers, width, shard=name == "sharded") for name in ("single", "replicated", "sharded")}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(WARM_UP + repeats):
        for name, optimizer in arms.items():
            torch.set_num_threads(ranks if name == "single" else 1)
            taken = _time(optimizer.step if name != "single" or rank == 0 else None)
            if turn >= WARM_UP:
                seconds[name].append(taken)
    rows = []
    for name, optimizer in arms.items():
        held = torch.tensor(_state_bytes(optimizer) / 1e6)
        dist.all_reduce(held, op=dist.ReduceOp.MAX)
        excess = [taken / alone - 1 for taken, alone in zip(seconds[name], seconds["single"], strict=True)]
        row: dict[str, Any] = {"name": name, "ranks": ranks, "every_n_steps": 1}
        row |= {"ms_per_step": 1e3 * statistics.median(seconds[name])}
        rows.append(row | {"overhead_percent": 100 * statistics.median(excess), "peak_mb": float(held)})
    if rank == 0:
        torch.save(rows, Path(folder, "rows.pt"))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads let go of tensors late, which at an interpreter's end aborts it (pytorch PR 179291)


def _optimizer(layers: int, width: int, shard: bool) -> ManifoldMuon:
    """Returns the optimizer of matrices that, like their gradients, are the same on every rank."""
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> Parameter:
        parameter = Parameter(torch.randn(rows, columns, generator=generator) / rows**0.5)
        parameter.grad = torch.randn(rows, columns, generator=generator)
        return parameter

    attention, mlp = [], []
    for _ in range(layers):
        attention += [matrix(3 * width, width), matrix(width, width)]
        mlp += [matrix(4 * width, width), matrix(width, 4 * width)]
    groups = [{"params": attention, "manifold": "stiefel"}, {"params": mlp, "manifold": "dgram"}]
    return ManifoldMuon(groups, lr=0.02, shard=shard)


def _time(step: Callable[[], Any] | None) -> float:
    """Returns the seconds until all ranks are done, on whichever it takes longest."""
    dist.barrier()
    started = time.perf_counter()
    if step is not None:
        step()
    taken = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


def _state_bytes(optimizer: ManifoldMuon) -> int:
    return sum(value.nbytes for state in optimizer.state.values() for value in state.values())
