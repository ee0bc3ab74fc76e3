"""Manifold Muon on several ranks: one owner for each matrix, equal weights everywhere, checkpoints for any number."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from geocont.errors import UserError
from geocont.manifolds import as_manifold
from geocont.optim import Block, ManifoldMuon, ModuleWise, MuonOptions, NamedParameters
from geocont.optim.sharding import cost, plan

STEPS, SAVED_AT = 20, 8
SHAPES = {"layers.0.q": (24, 24), "layers.0.up": (40, 16), "layers.0.down": (12, 32), "embed": (10, 6), "norm": (6,)}
WEIGHTS = {"q": r"layers\.(\d+)\.q", "up": r"layers\.(\d+)\.up", "down": r"layers\.(\d+)\.down"}
MATRICES = [name for name in SHAPES if name.startswith("layers")]


@pytest.mark.parametrize("ranks", range(1, 9))
def test_every_matrix_has_one_owner_and_no_rank_does_much_more_than_another(ranks: int) -> None:
    """Protects any number of matrices, also fewer than ranks: padding was once counted wrong for 19 on 8."""
    for items in range(1, 21):
        costs = [float(1 + (7 * i) % 5) for i in range(items)]
        owners = plan(costs, ranks)
        assert owners == plan(costs, ranks)
        assert len(owners) == items
        assert set(owners) <= set(range(ranks))
        assert len(set(owners)) == min(items, ranks)
        loads = [sum(c for c, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(ranks)]
        assert max(loads) <= max(4 / 3 * max(sum(costs) / ranks, max(costs)), min(loads) + max(costs))
    assert plan([], ranks) == []
    assert plan([1.0], 2, loads=[3.0, 1.0]) == [1]


def test_what_takes_longer_costs_more() -> None:
    """Protects the balance: square matrices are quick on Stiefel and slow on DGram, the published solver always."""

    def of(shape: tuple[int, int], manifold: str, solver: str = "reweighted", iterations: int | None = None) -> float:
        return cost(shape, as_manifold(manifold), solver, iterations)

    square, tall = (256, 256), (1024, 256)
    assert of(square, "stiefel") < of(tall, "stiefel") < of(tall, "dgram") < of(square, "dgram")
    assert of(tall, "euclidean") < of(tall, "stiefel", "projected") < of(tall, "stiefel", iterations=1)
    assert of(tall, "stiefel") < of(tall, "stiefel", "dual_ascent")
    assert of(tall, "dgram") == of((256, 1024), "dgram")


def gradient(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def build(shard: bool = True) -> tuple[dict[str, Parameter], ModuleWise]:
    """Three matrices of different shapes, and two tensors for AdamW."""
    parameters = {name: Parameter(gradient(shape, 900 + i) / 5) for i, (name, shape) in enumerate(SHAPES.items())}
    named = NamedParameters(parameters.items())
    return parameters, ModuleWise(named, "hetero", muon=MuonOptions(lr=0.05, shard=shard), weights=WEIGHTS)


def take_step(parameters: dict[str, Parameter], optimizer: torch.optim.Optimizer, step: int) -> None:
    for i, p in enumerate(parameters.values()):
        p.grad = gradient(tuple(p.shape), 100 * step + i).to(p.dtype)
    optimizer.step()


def values_of(parameters: dict[str, Parameter]) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in parameters.items()}


def equal_on_all_ranks(tensors: dict[str, Tensor]) -> bool:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, {name: tensor.float().numpy().tobytes() for name, tensor in tensors.items()})
    return all(each == found[0] for each in found)


def state_bytes(optimizer: torch.optim.Optimizer, parameters: dict[str, Parameter]) -> int:
    states = [optimizer.state.get(parameters[name], {}) for name in MATRICES]
    return sum(value.numel() * value.element_size() for state in states for value in state.values())


def on_ranks(folder: Path, check: Callable[[int, Path], None], ranks: int = 2, timeout: float = 60) -> None:
    """Runs a function of this module on ``ranks`` processes that share a gloo group; none may hang."""
    code = f"from {__name__} import work, {check.__name__}; work({check.__name__})"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": str(ranks)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parents[2],
            env={**environment, "RANK": str(rank), "FOLDER": str(folder)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        errors = [process.communicate(timeout=timeout)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(errors)


def work(check: Callable[[int, Path], None]) -> None:
    folder, rank = Path(os.environ["FOLDER"]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    store = f"file://{folder / check.__name__}.store"
    ranks = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store, timedelta(seconds=30), rank=rank, world_size=ranks)
    check(rank, folder)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # see geocont.bench.ddp


def train_shared(rank: int, folder: Path) -> None:
    """Twenty steps of the whole model: what holds after each, and what it leaves for the test to compare."""
    parameters, optimizer = build()
    replicated, alone = build(shard=False)
    history = []
    for step in range(STEPS):
        take_step(parameters, optimizer, step)
        take_step(replicated, alone, step)
        assert equal_on_all_ranks(values_of(parameters)), f"step {step}"
        history.append(values_of(parameters))
        if step == SAVED_AT - 1:
            optimizer.consolidate_state_dict()
            if rank == 0:
                torch.save({"weights": history[-1], "optimizer": optimizer.state_dict()}, folder / "two.pt")
            assert len([name for name in MATRICES if parameters[name] in optimizer.state]) < 3  # dropped again
            with pytest.raises(UserError, match="call consolidate_state_dict"):
                optimizer.state_dict()
    for name in SHAPES:
        torch.testing.assert_close(parameters[name], replicated[name], atol=1e-5, rtol=0.0)

    own = optimizer.parts["muon"].statistics()
    whole = optimizer.parts["muon"].gather_statistics()
    assert 0 < len(own) < len(whole) == 3
    assert [each for each in whole if each in own] == own
    assert [each.parameter for each in whole] == [each.parameter for each in alone.parts["muon"].gather_statistics()]
    assert len(optimizer.parts["muon"].manifold_residuals()) == 3

    sizes: list[Any] = [None, None]
    dist.all_gather_object(sizes, state_bytes(optimizer, parameters))
    assert sum(sizes) == state_bytes(alone, replicated)
    assert max(sizes) < 0.75 * sum(sizes)
    assert all(len(optimizer.state[parameters[name]]) == 3 for name in ("embed", "norm"))  # AdamW's is not shared

    before, momenta = values_of(parameters), {p: copy.deepcopy(dict(s)) for p, s in optimizer.state.items()}
    for i, p in enumerate(parameters.values()):
        p.grad = gradient(tuple(p.shape), i)
    if rank == 1:  # one rank alone: both must skip, or one waits for the other forever
        parameters["layers.0.up"].grad[2, 3] = float("nan")  # type: ignore[index]
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert all(torch.equal(value, before[name]) for name, value in values_of(parameters).items())
    assert all(torch.equal(optimizer.state[p][key], value) for p, old in momenta.items() for key, value in old.items())
    take_step(parameters, optimizer, STEPS)
    assert optimizer.skipped_steps == 1
    assert equal_on_all_ranks(values_of(parameters))

    if rank == 0:
        parameters["layers.0.q"].grad = None
    with pytest.raises(UserError, match=r"layers\.0\.q: some ranks have a gradient"):
        optimizer.step()
    if rank == 0:
        torch.save(history, folder / "history.pt")


def resume_shared(rank: int, folder: Path) -> None:
    """Goes on, on two ranks, from what one rank has saved, and from what two have."""
    for name in ("one", "two"):
        parameters, optimizer = restore(torch.load(folder / f"{name}.pt", weights_only=True))
        optimizer.consolidate_state_dict()  # saved again before the first step, as Lightning does
        assert len(optimizer.state_dict()["state"]) == len(SHAPES)
        for step in range(SAVED_AT if name == "two" else SAVED_AT + 4, STEPS):
            take_step(parameters, optimizer, step)
        assert len([name for name in MATRICES if parameters[name] in optimizer.state]) < 3
        assert equal_on_all_ranks(values_of(parameters))
        if rank == 0:
            torch.save(values_of(parameters), folder / f"resumed_{name}.pt")


def restore(saved: dict[str, Any]) -> tuple[dict[str, Parameter], ModuleWise]:
    parameters, optimizer = build()
    for name, value in saved["weights"].items():
        parameters[name].data.copy_(value)
    optimizer.load_state_dict(saved["optimizer"])
    return parameters, optimizer


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that two ranks have left after :func:`train_shared`, whose own checks held."""
    folder = tmp_path_factory.mktemp("trained")
    on_ranks(folder, train_shared)
    return folder


def test_two_ranks_hold_the_same_weights_after_every_step_and_those_of_one(trained: Path) -> None:
    """Protects from torn parameters (buffers freed too early), doubled state and hangs; see :func:`train_shared`."""
    parameters, optimizer = build()
    take_step(parameters, optimizer, 0)
    for name, value in torch.load(trained / "history.pt", weights_only=True)[0].items():
        torch.testing.assert_close(parameters[name].detach(), value, atol=1e-5, rtol=0.0)


def test_a_checkpoint_resumes_on_any_number_of_ranks(trained: Path, tmp_path: Path) -> None:
    """Protects the state that other ranks hold: without it, momentum starts from nothing, and nobody notices."""
    history = torch.load(trained / "history.pt", weights_only=True)
    saved = torch.load(trained / "two.pt", weights_only=True)
    torch.save(saved, tmp_path / "two.pt")
    assert len(saved["optimizer"]["state"]) == len(SHAPES)
    parameters, optimizer = restore(saved)
    for step in range(SAVED_AT, SAVED_AT + 4):
        take_step(parameters, optimizer, step)
    torch.save({"weights": values_of(parameters), "optimizer": optimizer.state_dict()}, tmp_path / "one.pt")
    for name, value in history[SAVED_AT + 3].items():
        torch.testing.assert_close(parameters[name].detach(), value, atol=1e-5, rtol=0.0)

    on_ranks(tmp_path, resume_shared)
    for name, exact in (("two", True), ("one", False)):
        resumed = torch.load(tmp_path / f"resumed_{name}.pt", weights_only=True)
        for key, value in history[-1].items():
            assert not exact or torch.equal(resumed[key], value)
            torch.testing.assert_close(resumed[key], value, atol=1e-5, rtol=0.0)


@pytest.mark.slow
def test_lightning_saves_it_and_resumes_it(tmp_path: Path) -> None:
    """Protects checkpoints as Lightning writes them: it asks rank 0 alone for the state, which has half of it."""
    overlays = [f"--config=conf/{name}.yaml" for name in ("experiment/gpt2/hetero", "experiment/gpt2/cpu")]
    small = [f"--model.network.{size}" for size in ("layers=1", "width=32", "context=32")]
    small += ["--data.context=32", "--data.batch_size=4", "--logger.wandb=null", "--trainer.limit_val_batches=0"]
    base = [*overlays, "--config=conf/trainer/ddp_cpu.yaml", *small]

    def fit(*options: str) -> None:
        command = [sys.executable, "-m", "geocont", "fit", *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=120, stdout=subprocess.DEVNULL)

    def saved(name: str) -> dict[str, Any]:
        return torch.load(tmp_path / name / "checkpoints/last.ckpt", weights_only=True)

    fit(*base, "--run.dir=whole", "--trainer.max_steps=4")
    fit(*base, "--run.dir=part", "--trainer.max_steps=2")
    shutil.copytree(tmp_path / "part", tmp_path / "alone")
    fit("--resume=part", "--trainer.max_steps=4")
    fit("--resume=alone", "--trainer.max_steps=4", "--trainer.devices=1", "--trainer.strategy=auto")
    whole, part, alone = saved("whole"), saved("part"), saved("alone")
    for key, value in whole["state_dict"].items():
        assert torch.equal(part["state_dict"][key], value), key
    states = [each["optimizer_states"][0]["state"] for each in (whole, part, alone)]
    assert states[0].keys() == states[1].keys() == states[2].keys()
    for i, state in states[0].items():
        assert state.keys() == states[1][i].keys() == states[2][i].keys()
        assert all(torch.equal(states[1][i][key], value) for key, value in state.items())


def share_little(rank: int, folder: Path) -> None:
    """Fewer matrices than ranks, matrices without gradients, late ones, fused ones, bfloat16, and a clean end."""
    p = Parameter(gradient((20, 8), 1))
    optimizer = ManifoldMuon([("w", p)], lr=0.1)
    for step in range(3):
        take_step({"w": p}, optimizer, step)
        assert equal_on_all_ranks({"w": p.detach()})
    assert (p in optimizer.state) == (rank == 0)
    assert len(optimizer.statistics()) == (rank == 0)
    assert len(optimizer.gather_statistics()) == 1
    optimizer.consolidate_state_dict(to=1)
    if rank == 1:
        assert optimizer.state_dict()["state"][0].keys() == {"momentum_buffer", "carry_0"}
    copied = copy.deepcopy(optimizer)
    assert copied.owns(copied.param_groups[0]["params"][0]) == (rank == 0)

    p.grad = None
    optimizer.step()  # nothing to exchange
    late = Parameter(gradient((16, 16), 2).bfloat16())
    fused = Parameter(gradient((8, 24), 3))
    blocks = [Block("stiefel", columns=(0, 16)), Block("dgram", columns=(16, 24))]
    optimizer.add_param_group({"params": [("late", late)], "manifold": "euclidean"})
    optimizer.add_param_group({"params": [("fused", fused)], "blocks": blocks})
    parameters = {"w": p, "late": late, "fused": fused}
    for step in range(2):
        take_step(parameters, optimizer, step)
        assert equal_on_all_ranks(values_of(parameters))
    assert [(each.parameter, each.block) for each in optimizer.gather_statistics()] == [
        *(("w", 0), ("late", 0), ("fused", 0), ("fused", 1))
    ]
    optimizer.shard = False
    with pytest.raises(UserError, match="before the number of ranks changes"):
        take_step(parameters, optimizer, 2)
    optimizer.shard = True
    optimizer.consolidate_state_dict()
    if rank == 0:
        state = optimizer.state_dict()["state"]
        assert [state[i]["momentum_buffer"].dtype for i in range(3)] == [torch.float32, torch.bfloat16, torch.float32]


def test_a_rank_may_have_nothing_to_do(tmp_path: Path) -> None:
    """Protects one matrix on two ranks, and all on three: a share that is empty once raised or hung."""
    on_ranks(tmp_path, share_little)


def test_without_ranks_nothing_is_shared_and_consolidation_does_nothing() -> None:
    """Protects the single process, which has no process group."""
    parameters, optimizer = build()
    take_step(parameters, optimizer, 0)
    before = {key: value.clone() for key, value in optimizer.state[parameters["layers.0.up"]].items()}
    optimizer.consolidate_state_dict()
    assert len(optimizer.state_dict()["state"]) == len(SHAPES)
    assert all(torch.equal(optimizer.state[parameters["layers.0.up"]][key], value) for key, value in before.items())
    muon = optimizer.parts["muon"]
    assert isinstance(muon, ManifoldMuon)
    assert not muon.sharded
    assert muon.gather_statistics() == muon.statistics()
    assert [each.parameter for each in muon.statistics()] == MATRICES
