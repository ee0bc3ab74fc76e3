"""Processes that a launcher from outside starts: torchrun, here over loopback, and srun."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from geocont.runs.store import read_metrics
from tests.conftest import SMALL

ROOT = Path(__file__).parents[2]
OPTIONS = [
    *("--config", "conf/experiment/gpt2/hetero.yaml", "--config", "conf/experiment/gpt2/cpu.yaml"),
    *("--config", "conf/trainer/ddp_cpu.yaml", "--trainer.max_steps=3", "--trainer.val_check_interval=3"),
    *("--trainer.limit_val_batches=2", "--model.network.width=32", "--model.network.context=32"),
    *("--data.context=32", "--data.batch_size=4"),
]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def on_two_nodes(*options: str) -> list[str]:
    """Starts both nodes, waits for them, and returns what they said."""
    given = {"NODES": "2", "PROCESSES": "1", "MASTER": f"127.0.0.1:{free_port()}"}
    environment = {**os.environ, **given, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
    command = [str(ROOT / "bin/torchrun.sh"), *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    nodes = [subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) for _ in range(2)]  # type: ignore[call-overload]
    said = [node.communicate(timeout=180)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(said)
    return said


@pytest.mark.parametrize("names", [("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_processes_of_one_launch_must_be_told_where_they_meet(
    monkeypatch: pytest.MonkeyPatch, geocont: Callable[..., tuple[int, str, str]], names: tuple[str, str], rank: str
) -> None:
    """Each process of a plain torchrun or srun trained in a directory of its own, or waited for the others in vain."""
    for name, value in zip(names, (rank, "2"), strict=True):
        monkeypatch.setenv(name, value)
    status, _, err = geocont("fit", *SMALL)
    assert status == 2
    assert "run.dir: the 2 processes of this launch must share a directory" in err
    assert not Path("runs").exists()


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".venv/bin/torchrun").exists(), reason="bin/torchrun.sh takes .venv's torchrun")
def test_two_nodes_train_and_resume_as_two_processes_do(tmp_path: Path) -> None:
    """A launcher that gives each node a run of its own, or another batch, is found out on a cluster only."""
    on_two_nodes(*OPTIONS, "--trainer.devices=1", f"--run.dir={tmp_path / 'nodes'}")
    alone = [sys.executable, "-m", "geocont", "fit", *OPTIONS, "--run.dir", str(tmp_path / "one")]
    subprocess.run(alone, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=180, check=True)
    nodes, one = (read_metrics(tmp_path / name) for name in ("nodes", "one"))
    assert [row["step"] for row in nodes] == [row["step"] for row in one]
    for key in ("train/loss", "val/loss", "weight/v1/q", "spectrum/sigma_max/up/layer_00"):
        values = [[row[key] for row in rows if key in row] for rows in (nodes, one)]
        assert values[0] == pytest.approx(values[1], rel=1e-4), key
    assert json.loads((tmp_path / "nodes/manifest.json").read_text())["status"] == "finished"
    assert len(list((tmp_path / "nodes/wandb").glob("offline-run-*"))) == 1
    on_two_nodes(f"--resume={tmp_path / 'nodes'}", "--trainer.max_steps=5")
    assert read_metrics(tmp_path / "nodes")[-1]["step"] == 5


@pytest.mark.parametrize("options", [[], ["--config=conf/experiment/mlp/res_relu.yaml"], ["--run.dir"]])
def test_the_launcher_says_in_one_line_what_it_needs(options: list[str]) -> None:
    """The reason was lost in the fifty lines that torchrun writes of processes that ended."""
    done = subprocess.run(["bash", ROOT / "bin/torchrun.sh", *options], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "bin/torchrun.sh needs --run.dir=DIR, a new one that all nodes see, or --resume=DIR\n"
