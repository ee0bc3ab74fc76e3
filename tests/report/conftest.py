"""Two small runs for all tests of reports: a residual MLP, and a GPT-2 with every callback and W&B on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from geocont.cli import main
from tests.conftest import CACHE, SMALL

STEPS = ["--trainer.max_epochs=-1", "--trainer.max_steps=6", "--trainer.limit_val_batches=1"]
GPT2 = [
    *("--config", "conf/experiment/gpt2/hetero_inv.yaml", "--config", "conf/experiment/gpt2/cpu.yaml"),
    *("--trainer.accelerator=cpu", "--trainer.val_check_interval=6"),
    *("--model.network.width=32", "--model.network.context=32", "--data.context=32", "--data.batch_size=4"),
    *(f"--callbacks.{name}.every_n_steps=2" for name in ("weight_continuity", "gradient_coherence")),
    *(f"--callbacks.{name}.every_n_steps=2" for name in ("softmax_saturation", "spectral_dynamics")),
    *("--callbacks.optimizer_monitor.every_n_steps=2", "--callbacks.step_monitor.every_n_steps=2"),
    *("--callbacks.stability_guard.max_logit=0.01", "--callbacks.stability_guard.every_n_steps=2"),
]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The directories of ``mlp`` and ``gpt2``; not to be changed."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GEOCONT_CACHE", str(CACHE))
        patch.setenv("WANDB_MODE", "offline")
        patch.chdir(folder)
        every = [f"--callbacks.{name}.every_n_steps=1" for name in ("weight_continuity", "gradient_coherence")]
        for name, options in (("mlp", [*SMALL, *every]), ("gpt2", GPT2)):
            assert main(["fit", *options, *STEPS, "--run.dir", str(folder / name)]) == 0
    return {name: folder / name for name in ("mlp", "gpt2")}


@pytest.fixture
def copy_of(trained: dict[str, Path], tmp_path: Path) -> Callable[..., Path]:
    """Copies a trained run, to be spoilt."""

    def copy(name: str, to: str) -> Path:
        return Path(shutil.copytree(trained[name], tmp_path / to))

    return copy
