"""The command itself: quick help, other folders, wheels, kills."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from geocont.conf import find_config
from geocont.errors import UserError
from geocont.runs.store import read_metrics
from tests.conftest import SMALL, same, weights_of

ROOT = Path(__file__).parents[2]
GEOCONT = [sys.executable, "-m", "geocont"]


def run(*arguments: str, cwd: Path, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*GEOCONT, *arguments], cwd=cwd, capture_output=True, text=True, timeout=120, check=False, **options
    )  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize(
    "arguments", [["--help"], ["reproduce", "--help"], ["reproduce", "mlp", "--help"], ["bench", "--help"]]
)
def test_help_of_commands_that_do_not_train_loads_no_torch(arguments: list[str], tmp_path: Path) -> None:
    """Importing torch and lightning takes seconds, which a person who only asks for help should not wait."""
    code = (
        "import sys; from geocont.cli import main\n"
        f"try: main({arguments!r})\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'lightning', 'wandb', 'matplotlib', 'datasets'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage: geocont" in done.stdout


def test_one_help_names_every_command(tmp_path: Path) -> None:
    out = run("--help", cwd=tmp_path).stdout
    assert all(f"\n  {command} " in out for command in ("fit", "validate", "test", "predict", "reproduce", "bench"))
    unknown = run("repoduce", cwd=tmp_path)
    assert unknown.returncode == 2
    assert "did you mean reproduce?" in unknown.stderr


def test_help_of_training_describes_every_option(tmp_path: Path) -> None:
    out = run("fit", "--help", cwd=tmp_path).stdout
    for text in ("--resume", "--run.experiment", "--callbacks.weight_continuity", "--logger.wandb"):
        assert text in out
    details = run("fit", "--model.help=geocont.modules.ResidualMLPModule", cwd=tmp_path).stdout
    assert "x tanh(||x||)" in details
    assert "warm-up" in details


def test_shipped_configurations_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_config("conf/base.yaml") == ROOT / "conf/base.yaml"
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/base.yaml").write_text("{}")
    assert find_config("conf/base.yaml") == Path("conf/base.yaml")  # one's own comes first
    with pytest.raises(UserError, match=r"my-own is not a file here or among the shipped ones; shipped files are in"):
        find_config("my-own")


def test_ones_own_callbacks_package_in_the_way_is_named(tmp_path: Path) -> None:
    """`import callbacks` meets a user's own folder of that name when it comes first on the path."""
    (tmp_path / "callbacks").mkdir()
    (tmp_path / "callbacks/__init__.py").write_text("mine = 1\n")
    done = run("fit", *SMALL, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 2
    line = done.stderr.strip().splitlines()[-1]
    assert f"a package of yours, {tmp_path}/callbacks/__init__.py, hides geocont's own `callbacks`" in line


@pytest.mark.slow
def test_a_wheel_installed_elsewhere_has_its_configurations(tmp_path: Path) -> None:
    pytest.importorskip("pip")
    source = tmp_path / "source"
    ignore = shutil.ignore_patterns(".venv", ".git", "__pycache__", "*_cache")
    shutil.copytree(ROOT, source, ignore=ignore)
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, source], check=True)
    wheel = next(tmp_path.glob("geocont-*.whl"))
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    (tmp_path / "empty").mkdir()
    code = "import sys; from geocont.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "fit", *SMALL, "--trainer.max_epochs=1", "--trainer.limit_train_batches=2"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(command, cwd=tmp_path / "empty", env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list((tmp_path / "empty/runs/mlp/res_relu").iterdir())) == 1


def start(folder: Path, *options: str) -> subprocess.Popen[bytes]:
    frequent = ("--callbacks.last_checkpoint.every_n_steps=5", "--trainer.max_epochs=-1", "--trainer.max_steps=400")
    arguments = [*SMALL, "--run.dir=run", *frequent, "--callbacks.weight_continuity.every_n_steps=5", *options]
    return subprocess.Popen(
        [*GEOCONT, "fit", *arguments], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def wait_for_step(folder: Path, step: int) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        rows = read_metrics(folder / "run")
        if rows and rows[-1]["step"] >= step:
            return
        time.sleep(0.01)
    raise AssertionError(f"step {step} was not reached")


def test_a_run_killed_at_any_moment_resumes_to_the_same_end(tmp_path: Path) -> None:
    for attempt, step in enumerate((30, 90)):
        process = start(tmp_path) if attempt == 0 else subprocess.Popen([*GEOCONT, "fit", "--resume=run"], cwd=tmp_path)
        wait_for_step(tmp_path, step)
        process.kill()
        process.wait()
        torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)
    assert json.loads((tmp_path / "run/manifest.json").read_text())["status"] == "running"
    done = run("fit", "--resume=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    other = tmp_path / "other"
    other.mkdir()
    assert start(other).wait() == 0
    assert same(weights_of(tmp_path / "run"), weights_of(other / "run"))
    killed, whole = ([row["step"] for row in read_metrics(folder / "run")] for folder in (tmp_path, other))
    assert killed == whole


def test_sigterm_saves_and_ends(tmp_path: Path) -> None:
    process = start(tmp_path, "--callbacks.last_checkpoint.every_n_steps=100000")
    wait_for_step(tmp_path, 20)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 143
    checkpoint = torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    assert manifest["status"] == "interrupted"
    assert checkpoint["global_step"] == manifest["step"] >= 20
    done = run("fit", "--resume=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["every process", "rank 1"])
def test_sigterm_stops_all_ranks_after_one_step(asked: str, tmp_path: Path) -> None:
    """Schedulers signal processes at different batches, or one of them: one that stops alone leaves others waiting."""
    options = ("--config=conf/trainer/ddp_cpu.yaml", "--callbacks.last_checkpoint.every_n_steps=100000")
    process = start(tmp_path, *options, "--trainer.max_steps=100000")
    try:
        wait_for_step(tmp_path, 20)
        child = int(subprocess.check_output(["pgrep", "-P", str(process.pid), "-f", "geocont"]).split()[0])
        os.kill(child, signal.SIGTERM)
        if asked == "every process":
            time.sleep(0.05)  # some batches later
            process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 143
    finally:
        process.kill()
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    assert manifest["status"] == "interrupted"
    checkpoint = torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == manifest["step"] >= 20
    steps = str(manifest["step"] + 5)
    done = run("fit", "--resume=run", f"--trainer.max_steps={steps}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert read_metrics(tmp_path / "run")[-1]["step"] == manifest["step"] + 5


def test_two_runs_started_at_once_in_one_folder_do_not_disturb_each_other(tmp_path: Path) -> None:
    options = [*SMALL[:2], *SMALL[3:], "--trainer.max_epochs=1", "--trainer.limit_train_batches=5"]  # with W&B
    both = [subprocess.Popen([*GEOCONT, "fit", *options], cwd=tmp_path, stdout=subprocess.PIPE) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0].decode() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    runs = sorted((tmp_path / "runs/mlp/res_relu").iterdir())
    assert len(runs) == 2
    assert same(weights_of(runs[0]), weights_of(runs[1]))
    for directory in runs:
        assert [row["step"] for row in read_metrics(directory)] == [0, 1, 2, 4, 5]
        assert len(list((directory / "wandb").glob("offline-run-*"))) == 1
        assert any(str(directory.name) in output for output in outputs)
        assert re.search(r"dashboard: \S*wandb leet \S+", outputs[0])


def test_a_run_that_goes_on_is_not_resumed_by_a_second_process(tmp_path: Path) -> None:
    process = start(tmp_path, "--trainer.max_steps=100000")
    wait_for_step(tmp_path, 20)
    second = run("fit", "--resume=run", cwd=tmp_path)
    process.kill()
    assert second.returncode == 2
    assert "is being written by another process" in second.stderr


def test_two_processes_on_the_processor_make_one_run_and_resume_it(tmp_path: Path) -> None:
    """Lightning starts the command again for each device: every process once made a run of its own."""
    ddp = [f"--trainer.{key}" for key in ("devices=2", "strategy=ddp", "max_epochs=1", "limit_train_batches=6")]
    options = [*SMALL[:2], *SMALL[3:], *ddp]  # with W&B
    first = run("fit", *options, "--run.dir=run", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    second = run("fit", "--resume=run", "--trainer.max_epochs=2", cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    steps = [row["step"] for row in read_metrics(tmp_path / "run")]
    assert steps == sorted(set(steps))
    assert steps[-1] == 12
    assert not (tmp_path / "runs").exists()
    assert len(list((tmp_path / "run/wandb").glob("offline-run-*"))) == 2  # one for each session, of one identity


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["fit"], "required: fit.model; an experiment has one, for example --config conf/experiment/mlp/res_relu.yaml"),
        (["fit", *SMALL, "--trainer.max_epochs=abc"], "trainer.max_epochs: expected int. Got value: abc"),
        (["fit", *SMALL, "--model.network.depth=two"], "model.network.depth: expected int. Got value: two"),
        (["fit", *SMALL, "--model.network.depth=0"], "model.network.depth must be at least 1, got 0"),
        (["fit", *SMALL, "--model.optimizer.lr=x"], "model.optimizer.lr: expected float. Got value: x"),
        (
            ["fit", *SMALL, "--model.optimizer=Foo"],
            "model.optimizer: expected a class, as package.module.Class. Got value: Foo",
        ),
        (["fit", *SMALL, "--data.class_path=no.Data"], "data.class_path: class_path 'no.Data': No module named 'no'"),
        (["fit", *SMALL, "--trainer.precision=bf17"], "'32', '16', 'bf16'. Got value: bf17; did you mean bf16?"),
        (["fit", *SMALL, "--trainer.devices=x"], "should be an int > 0. (--trainer.devices=x)"),
        (["fit", *SMALL, "--data.batchsize=5"], "data.batchsize is not an option; did you mean batch_size?"),
        (["fit", *SMALL, "--callbacks.weight_continuity=true"], "given one by one, and null turns it off"),
        (["fit", *SMALL, "--config=c.yaml"], "trainer.max_epoch is not an option; did you mean trainer.max_epochs?"),
        (
            ["fit", *SMALL, "--trainer.val_check_interval=4000"],
            "`val_check_interval` (4000)",
        ),
    ],
)
def test_a_refused_option_is_named_with_its_value(
    geocont: Callable[..., tuple[int, str, str]], folder: Path, options: list[str], told: str
) -> None:
    """What a newcomer types first, or types wrong, was answered without the value or the way out."""
    (folder / "c.yaml").write_text("trainer: {max_epoch: 3}\n")
    status, _, err = geocont(*options)
    assert status == 2
    assert told in err
    assert err.count("\n") == 1


def test_null_reaches_the_options_of_a_class(geocont: Callable[..., tuple[int, str, str]]) -> None:
    """What a file may say, the command line refused: jsonargparse hands null on to the class as the word None."""
    status, out, err = geocont(
        "fit", *SMALL, "--model.network.scale=0.1", "--model.network.scale=null", "--print_config"
    )
    assert status == 0, err
    assert yaml.safe_load(out)["model"]["init_args"]["network"]["scale"] is None


def test_evaluation_without_a_checkpoint_says_whose_weights_it_takes(
    geocont: Callable[..., tuple[int, str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    """`geocont validate` without --ckpt_path scored fresh weights, and looked like a bad model."""
    status, out, err = geocont("validate", *SMALL, "--trainer.limit_val_batches=1")
    assert status == 0, out + err
    assert "the weights are those the model starts with; --ckpt_path=FILE" in caplog.text + err
