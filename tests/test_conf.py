"""Every shipped configuration: a file that rots fails the build."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from geocont.conf import conf_folder

FILES = sorted(path for path in conf_folder().rglob("*.yaml") if path.parent.name != "sweep")  # tests/cli/test_sweep.py
OVERLAYS = [path for path in FILES if path.name != "base.yaml"]
SHORT = ["--trainer.max_epochs=-1", "--trainer.max_steps=3", "--logger.wandb=null"]
SHORT_MLP = ["--model.network.width=24"]
SHORT_GPT2 = [  # the small overlay, on text that needs no network
    *("--config", "conf/experiment/gpt2/cpu.yaml", "--trainer.val_check_interval=3", "--trainer.limit_val_batches=2"),
    *("--model.network.width=32", "--model.network.context=32", "--data.context=32", "--data.batch_size=4"),
]
SHORT_LLAMA = [
    *("--config", "conf/experiment/llama/cpu.yaml", "--trainer.val_check_interval=3", "--trainer.limit_val_batches=2"),
    *("--model.network.layers=2", "--model.network.width=32", "--model.network.hidden=48"),
    *("--model.network.context=32", "--data.context=32", "--data.batch_size=4"),
]
#: They start processes, which only the command itself can; two on the processor here, whatever they are for.
PARALLEL = {"ddp.yaml", "ddp_cpu.yaml", "multi_node.yaml"}
SHORT_PARALLEL = ["--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.num_nodes=1"]


def name(path: Path) -> str:
    return str(path.relative_to(conf_folder()))


def command(path: Path) -> list[str]:
    """The command on a file's first line, without MNIST from the hub."""
    words = shlex.split(path.read_text().splitlines()[0].removeprefix("# "))
    assert words[:2] == ["geocont", "fit"]
    return words[2:]


@pytest.mark.parametrize("path", OVERLAYS, ids=name)
def test_first_line_is_the_command_that_uses_the_file(path: Path, geocont: Callable[..., tuple[int, str, str]]) -> None:
    assert f"conf/{name(path)}" in command(path)
    status, out, err = geocont("fit", *command(path), "--print_config")
    assert status == 0, err
    config = yaml.safe_load(out)
    for switch in ("last_checkpoint", "progress_bar", "step_monitor"):
        assert config["callbacks"][switch] is not None, "an overlay must not lose what the base has"


@pytest.mark.parametrize(
    "path", [path for path in OVERLAYS if "data" not in path.parts and path.name not in PARALLEL], ids=name
)
def test_every_configuration_trains(path: Path, geocont: Callable[..., tuple[int, str, str]], folder: Path) -> None:
    given = command(path)
    families = {"gpt2": SHORT_GPT2, "llama": SHORT_LLAMA}
    short = next((options for family, options in families.items() if family in " ".join(given)), SHORT_MLP)
    status, out, err = geocont("fit", *given, *short, *SHORT, "--run.dir=run")
    assert status == 0, out + err
    if "debug" not in path.parts:
        assert (folder / "run/checkpoints/last.ckpt").exists()


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in OVERLAYS if path.name in PARALLEL], ids=name)
def test_every_configuration_of_several_processes_trains(path: Path, folder: Path) -> None:
    arguments = [*command(path), *SHORT_GPT2, *SHORT, *SHORT_PARALLEL, "--run.dir=run"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    fit = [sys.executable, "-m", "geocont", "fit", *arguments]
    done = subprocess.run(fit, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "MEMBER: 2/2" in done.stderr
    state = torch.load(folder / "run/checkpoints/last.ckpt", weights_only=True)["optimizer_states"][0]["state"]
    assert sum("momentum_buffer" in each for each in state.values()) == 16  # all of them: four a layer


def test_the_assignments_differ_in_nothing_but_their_name() -> None:
    """Protects the comparison of the second paper: the same model, data, schedule and rates for all of them."""
    texts = {path.stem: path.read_text() for path in FILES if path.parent.name == "gpt2" and path.stem != "cpu"}
    assert texts.keys() == {"unconstrained", "stiefel", "dgram", "hetero", "hetero_inv", "adamw"}
    configs = {name: yaml.safe_load(text) for name, text in texts.items()}
    for name, config in configs.items():
        assert config["run"].pop("experiment") == f"gpt2/{name}"
        assert config["model"]["init_args"]["optimizer"]["init_args"].pop("assignment") == name
    assert all(config == configs["hetero"] for config in configs.values())
