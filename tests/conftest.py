"""What the tests share: small trainings, in process, each in an empty folder."""

from __future__ import annotations

import getpass
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

CACHE = Path(tempfile.gettempdir()) / f"geocont-tests-{getpass.getuser()}"  # of tokens: kept, as their key says all

SMALL = [
    *("--config", "conf/experiment/mlp/res_relu.yaml", "--logger.wandb=null", "--trainer.accelerator=cpu"),
    *("--model.network.depth=4", "--model.network.width=24"),
]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "GEOCONT_RUN_DIR", "PL_GLOBAL_SEED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("GEOCONT_CACHE", str(CACHE))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is also the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def geocont(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs the command in this process; returns exit status, output and error output."""
    from geocont.cli import main

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = main(arguments)
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 0
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def fit(geocont: Callable[..., tuple[int, str, str]], folder: Path) -> Callable[..., Path]:
    """Trains a small residual MLP on digits with ``geocont fit`` and returns the run's directory."""

    def run(name: str, *options: str, base: Sequence[str] = SMALL) -> Path:
        status, out, err = geocont("fit", *base, "--run.dir", name, *options)
        assert status == 0, out + err
        return folder / name

    return run


def weights_of(run_dir: Path) -> dict[str, Tensor]:
    """Returns the parameters in a run's last checkpoint."""
    checkpoint = torch.load(run_dir / "checkpoints/last.ckpt", weights_only=True)
    return checkpoint["state_dict"]


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Tells whether two sets of tensors are equal bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


os.environ.setdefault("OMP_NUM_THREADS", "1")
