"""``geocont fit``: switches, directories, resumption, and what is said where something does not fit."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from geocont.runs.store import read_arrays, read_metrics
from tests.conftest import SMALL, same, weights_of

Command = Callable[..., tuple[int, str, str]]
Fit = Callable[..., Path]
BEGUN = ("mine/.lock", "mine/config.yaml", "mine/manifest.json")
EVERY = ("--callbacks.gradient_coherence.every_n_steps=1", "--callbacks.weight_continuity.every_n_steps=1")


def steps(count: int) -> list[str]:
    return ["--trainer.max_epochs=-1", f"--trainer.max_steps={count}"]


def test_a_run_leaves_everything_that_tells_it(fit: Fit) -> None:
    run = fit("run", *steps(3), "--trainer.limit_val_batches=1", "--trainer.val_check_interval=3")
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["status"] == "finished"
    assert manifest["seed"] == 0
    assert manifest["data"]["class"] == "geocont.data.images.Digits"
    assert len(manifest["data"]["fingerprint"]) == 33
    assert manifest["versions"]["torch"] == importlib.metadata.version("torch")
    assert manifest["command"].startswith("geocont fit --config ")
    assert set(manifest["git"] or {"commit": 0, "dirty": 0}) == {"commit", "dirty"}
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["model"]["init_args"]["network"]["width"] == 24
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert {"train/loss", "lr/adam", "weight/v1/hidden", "gradient/sigma2_in/hidden", "measure/milliseconds"} <= set(
        rows[0]
    )
    assert {"cumulative/v1/hidden", "update/relative_norm/hidden", "weight/cumulative_alignment/hidden"} <= set(rows[1])
    assert "val/accuracy" in rows[2]
    assert read_arrays(run, "weight/v1/hidden")[3].shape == (3,)
    assert read_arrays(run, "weight/v1_vector/hidden")[0].shape == (4, 24)


def test_callbacks_do_not_change_the_weights(fit: Fit) -> None:
    watched = fit("watched", *steps(60), *EVERY)
    off = ("--callbacks.gradient_coherence=null", "--callbacks.weight_continuity=null", "--callbacks.step_monitor=null")
    plain = fit("plain", *steps(60), *off)
    assert same(weights_of(watched), weights_of(plain))
    assert not any("weight/v1/hidden" in row for row in read_metrics(plain))


@pytest.mark.parametrize(("first", "total"), [(2, 4), (44, 60), (50, 90), (88, 100)])
def test_parts_equal_the_whole_bit_for_bit(fit: Fit, geocont: Command, first: int, total: int) -> None:
    """Resuming in mid-epoch, at an epoch's end (44 batches) or in a later epoch replayed or skipped data."""
    schedule = ("--model.schedule.shape=cosine", "--model.schedule.total_steps=200", "--model.schedule.warmup_steps=3")
    whole = fit("whole", *steps(total), *EVERY, *schedule)
    part = fit("part", *steps(first), *EVERY, *schedule)
    status, out, err = geocont("fit", "--resume", str(part), *steps(total))
    assert status == 0, out + err
    assert same(weights_of(whole), weights_of(part))
    one, two = ({row["step"]: row for row in read_metrics(run)} for run in (whole, part))
    assert one.keys() == two.keys()
    timing = ("measure/milliseconds", "throughput/samples_per_second")
    for step, row in one.items():
        assert {k: v for k, v in row.items() if k not in timing} == {
            k: v for k, v in two[step].items() if k not in timing
        }
    states = [torch.load(run / "checkpoints/last.ckpt", weights_only=True) for run in (whole, part)]
    epochs = [state["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"] for state in states]
    assert epochs == [total // 44] * 2
    assert states[0]["lr_schedulers"] == states[1]["lr_schedulers"]


def test_a_run_killed_before_its_first_regular_checkpoint_resumes_from_its_start(fit: Fit, geocont: Command) -> None:
    whole = fit("whole", *steps(7), *EVERY)
    part = fit("part", *steps(7), *EVERY, "--callbacks.last_checkpoint.dirpath=elsewhere")  # leaves none behind
    assert not (part / "checkpoints").exists()

    class Killed(Exception):
        """Stands for kill -9: nothing is saved."""

    def kill(*_: object) -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("geocont.modules.ResidualMLPModule.validation_step", kill)
        patch.setattr("geocont.modules.ResidualMLPModule.training_step", kill)
        with pytest.raises(Killed):
            geocont("fit", *SMALL, *steps(7), *EVERY, "--run.dir=early")
    assert geocont("fit", "--resume=early")[0] == 0
    assert same(weights_of(whole), weights_of(whole.parent / "early"))
    losses = [
        {row["step"]: row.get("train/loss") for row in read_metrics(run)} for run in (whole, whole.parent / "early")
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_stops_at_the_ends_of_shortened_epochs_lose_nothing(fit: Fit, geocont: Command, accumulate: int) -> None:
    """Saved after the last batch of an epoch that uses a part of the data, a run went on within that epoch."""
    short = ("--trainer.limit_train_batches=9", f"--trainer.accumulate_grad_batches={accumulate}")
    per_epoch = 9 // accumulate
    whole = fit("whole", *steps(3 * per_epoch + 1), *short)
    part = fit("part", *steps(per_epoch), *short)
    for total in (2 * per_epoch, 3 * per_epoch + 1):
        status, out, err = geocont("fit", "--resume=part", *steps(total))
        assert status == 0, out + err
    assert same(weights_of(whole), weights_of(part))
    assert [row["step"] for row in read_metrics(whole)] == [row["step"] for row in read_metrics(part)]


def test_a_resumed_run_may_change_its_cadence_and_keeps_what_it_has_summed(fit: Fit, geocont: Command) -> None:
    """The state's key holds the cadence: another one once meant new initial weights and an empty sum, silently."""
    whole, part = fit("whole", *steps(9), *EVERY), fit("part", *steps(6))
    status, out, err = geocont("fit", "--resume=part", *EVERY, *steps(9))
    assert status == 0, out + err
    rows = [{row["step"]: row for row in read_metrics(run)} for run in (whole, part)]
    for key in ("update/relative_norm/hidden", "cumulative/v1/hidden"):
        assert rows[0][8][key] == pytest.approx(rows[1][8][key], abs=1e-4)


def test_a_resumed_run_keeps_its_model_and_a_failed_attempt_spoils_nothing(fit: Fit, geocont: Command) -> None:
    """A rate given beside --resume was ignored, and a width that does not fit left a run that never resumed."""
    run = fit("run", *steps(2))
    before = (run / "config.yaml").read_text()
    for option in (
        "--model.optimizer.lr=0.5",
        "--model.network.width=32",
        "--data.batch_size=8",
        "--seed_everything=3",
    ):
        status, _, err = geocont("fit", "--resume=run", option)
        assert status == 2
        assert "a resumed run keeps model, data and seed" in err
    assert geocont("fit", "--resume=run", "--callbacks.weight_continuity.every_n_steps=0")[0] == 2
    assert (run / "config.yaml").read_text() == before
    assert geocont("fit", "--resume=run", *steps(3))[0] == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "callbacks: {weight_continuty: {}}",
            "callbacks.weight_continuty is not an option; did you mean weight_contin",
        ),
        ("callbacks: [a]", "callbacks must have named entries, not list"),
        ("trainer: null", "trainer must have named entries, not nothing"),
        ("[1, 2]", "must have named sections such as model, data, trainer, not a list"),
        ("a: [", "is not YAML"),
    ],
)
def test_a_file_of_another_shape_is_named(geocont: Command, folder: Path, content: str, message: str) -> None:
    """A misspelt callback in a file was ignored, and the run measured nothing."""
    (folder / "c.yaml").write_text(content)
    status, _, err = geocont("fit", *SMALL, "--config=c.yaml")
    assert status == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_what_cannot_be_resumed_or_evaluated_is_one_line(fit: Fit, geocont: Command) -> None:
    run = fit("run", *steps(2))
    config, checkpoint = ["--config", str(run / "config.yaml")], run / "checkpoints/last.ckpt"
    status, _, err = geocont("validate", *config, f"--ckpt_path={checkpoint}", "--model.network.width=32")
    assert (status, len(err.strip().splitlines())) == (2, 1), err
    assert "the checkpoint does not fit the model" in err
    for content in (b"", b"garbage", checkpoint.read_bytes()[:2000]):
        checkpoint.write_bytes(content)
        for command in (["fit", "--resume=run"], ["validate", *config, f"--ckpt_path={checkpoint}"]):
            status, _, err = geocont(*command)
            assert (status, len(err.strip().splitlines())) == (2, 1), err
            assert "cannot be read as a checkpoint" in err
    torch.save({"a": 1}, checkpoint)
    assert "is not a checkpoint of a training" in geocont("fit", "--resume=run")[2]
    (run / "manifest.json").write_text("[]")
    assert "is not the directory of a run" in geocont("fit", "--resume=run")[2]


def test_resume_last_takes_the_newest_run_of_the_experiment(geocont: Command, folder: Path) -> None:
    for seed in (1, 2):
        status, out, err = geocont("fit", *SMALL, *steps(2), "--run.experiment=e", f"--seed_everything={seed}")
        assert status == 0, out + err
    runs = sorted(
        (folder / "runs/e").iterdir(), key=lambda run: json.loads((run / "manifest.json").read_text())["seed"]
    )
    before = json.loads((runs[1] / "manifest.json").read_text())
    status, out, err = geocont("fit", "--run.experiment=e", "--resume=last", *steps(3))
    assert status == 0, out + err
    after = json.loads((runs[1] / "manifest.json").read_text())
    assert after["run_id"] == before["run_id"]
    assert after["step"] == 3
    assert json.loads((runs[0] / "manifest.json").read_text())["step"] == 2
    assert yaml.safe_load((runs[1] / "config.yaml").read_text())["seed_everything"] == 2


def test_nothing_to_resume_is_an_error_and_never_a_fresh_start(geocont: Command, folder: Path) -> None:
    """Lightning's own ckpt_path=last looks into the new run's folder, warns, and trains from scratch."""
    for arguments, message in (
        (("--resume", "last", *SMALL), "nothing to resume in runs/mlp/res_relu: there is no run"),
        (("--resume", "nowhere", *SMALL), "nowhere is not the directory of a run"),
        (("--ckpt_path", "last", *SMALL), "`geocont fit --resume last` continues a run"),
        (("--ckpt_path", "none.ckpt", *SMALL), "none.ckpt is not there"),
    ):
        status, _, err = geocont("fit", *arguments)
        assert status == 2, message
        assert message in err
        assert len(err.strip().splitlines()) == 1, err
    assert not list(folder.glob("runs/*/*/*/metrics.jsonl"))


def test_two_runs_in_one_folder_get_two_directories(geocont: Command, folder: Path) -> None:
    """With W&B's logger the log directory is shared, and a second run aborted on the first one's config.yaml."""
    for _ in range(2):
        assert geocont("fit", *SMALL, *steps(1))[0] == 0
    assert len(list((folder / "runs/mlp/res_relu").iterdir())) == 2
    assert geocont("fit", *SMALL, *steps(1), "--run.dir=here")[0] == 0
    status, _, err = geocont("fit", *SMALL, *steps(1), "--run.dir=here")
    assert status == 2
    assert "here holds a run already; continue it with --resume here" in err


def test_print_config_round_trips(geocont: Command, folder: Path) -> None:
    _, first, _ = geocont("fit", *SMALL, "--callbacks.step_monitor=null", "--print_config")
    (folder / "c.yaml").write_text(first)
    _, second, _ = geocont("fit", "--config", "c.yaml", "--print_config")
    assert first == second
    assert "gradient_coherence" in first
    assert yaml.safe_load(first)["callbacks"]["step_monitor"] is None


def test_switches_of_several_files_merge_by_name(geocont: Command, folder: Path) -> None:
    """A list of callbacks in a second file replaces the first one's: checkpoints and monitors vanish silently."""
    (folder / "overlay.yaml").write_text(
        "callbacks: {weight_continuity: {every_n_steps: 7}, gradient_coherence: null}\n"
    )
    _, out, _ = geocont("fit", *SMALL, "--config=overlay.yaml", "--print_config")
    callbacks = yaml.safe_load(out)["callbacks"]
    assert callbacks["weight_continuity"]["init_args"]["every_n_steps"] == 7
    assert callbacks["gradient_coherence"] is None
    assert callbacks["last_checkpoint"]["init_args"]["every_n_steps"] == 500


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--callbacks.weight_continuty.every_n_steps=3", "did you mean callbacks.weight_continuity"),
        ("--callbacks.weight_continuity.every_n_step=3", "did you mean every_n_steps"),
        ("--model.network.activation=rely", "did you mean relu"),
        ("--model.network.actvation=relu", "did you mean network.activation"),
        ("--trainer.max_epoch=3", "did you mean trainer.max_epochs"),
        ("--model.optimizer.betaz=[0.9,0.9]", "did you mean betas"),
        ("--config=conf/experiment/mlp/res_rely.yaml", "did you mean conf/experiment/mlp/res_relu.yaml"),
        ("--callbacks.weight_continuity.every_n_steps=0", "every_n_steps must be a whole number of at least 1, got 0"),
        ("--model.network.inputs=65", "network.inputs is 65, but the data has 64 features"),
        ("--data.batch_size=5000", "data.batch_size must be from 1 to 1437"),
        ("--model.optimizer.lr=-1", "model.optimizer: Invalid learning rate: -1.0"),
        ("--model.schedule.floor=3", "schedule.floor must be in [0, 1], got 3"),
        ("--callbacks.weight_continuity.weights={hidden: 'hiden.(\\d+).linear.weight'}", "nearest matrices are"),
    ],
)
def test_what_does_not_fit_is_one_line_with_the_way_out(geocont: Command, option: str, message: str) -> None:
    status, _, err = geocont("fit", *SMALL, *steps(1), option)
    assert status == 2
    line = err.strip().splitlines()[-1]
    assert line.startswith("geocont: error: ")
    assert message in line
    assert len(err.strip().splitlines()) == 1, err


def test_exponents_are_numbers_everywhere(geocont: Command, folder: Path) -> None:
    """YAML 1.1 reads 1e-3 as a string, which then fails deep inside the optimizer."""
    optimizer = "{class_path: torch.optim.Adam, init_args: {lr: 1e-3, eps: 1e-4, betas: [0.9, 0], weight_decay: 1e-2}}"
    (folder / "o.yaml").write_text(f"model: {{init_args: {{optimizer: {optimizer}}}}}\n")
    _, out, _ = geocont("fit", *SMALL, "--config=o.yaml", "--print_config")
    arguments = yaml.safe_load(out)["model"]["init_args"]["optimizer"]["init_args"]
    assert (arguments["lr"], arguments["eps"], arguments["betas"]) == (0.001, 0.0001, [0.9, 0])
    assert geocont("fit", *SMALL, "--config=o.yaml", *steps(2))[0] == 0


def test_validate_test_and_predict_take_a_runs_checkpoint(fit: Fit, geocont: Command) -> None:
    run = fit("run", *steps(44))
    accuracy = [row["val/accuracy"] for row in read_metrics(run) if "val/accuracy" in row][-1]
    for command, key in (("validate", "val/accuracy"), ("test", "test/accuracy")):
        checkpoint = str(run / "checkpoints/last.ckpt")
        status, out, err = geocont(command, "--config", str(run / "config.yaml"), "--ckpt_path", checkpoint)
        assert status == 0, out + err
        assert f"{accuracy:.4f}"[:6] in out, key
    assert geocont("predict", "--config", str(run / "config.yaml"), "--ckpt_path", checkpoint)[0] == 0


def test_lightning_still_lets_go_of_switches_that_are_off() -> None:
    """The switches rest on a private hook of LightningCLI: if it goes, this says so before a user meets it."""
    from lightning.pytorch.cli import LightningCLI

    assert callable(LightningCLI._instantiate_trainer)
    assert "callback_keys" in LightningCLI.instantiate_trainer.__code__.co_names


def test_an_offline_wandb_run_holds_every_key_on_the_step_axis(fit: Fit) -> None:
    from tests.runs.test_wandb import inspect, read_history, run_file

    online = [part for part in SMALL if part != "--logger.wandb=null"]
    run = fit("run", *steps(60), "--logger.wandb.notes=a note", "--logger.wandb.tags=[x]", base=online)
    rows = [row for row in read_history(run_file(run)) if "weight/v1/hidden" in row]
    assert [row["trainer/global_step"] for row in rows] == [0, 1, 2, 4, 8, 16, 32, 50, 60]
    light = ("v1", "u1", "topk_in", "topk_out", "cosine", "gap", "defined")
    full = ("sigma2_in", "sigma2_out", "gram_in", "gram_out")
    for family in ("weight", "gradient", "cumulative", "update"):
        assert {f"{family}/{name}/hidden" for name in (*light, *full)} <= set(rows[1]), family
    assert {"train/loss", "lr/adam", "measure/skipped", "measure/milliseconds"} <= set(rows[0])
    assert all(value == value for row in rows for value in row.values() if isinstance(value, float)), "NaN"
    assert rows[-1]["weight/heat_map/hidden"]["_type"] == "image-file"
    found = inspect(run_file(run))
    assert set(found["summary"]["weight/v1/hidden"]) == {"min", "max", "last"}
    assert found["config"]["manifest"]["data"]["class"] == "geocont.data.images.Digits"
    assert found["config"]["model"]["init_args"]["network"]["width"] == 24
    assert run_file(run).stem == f"run-{json.loads((run / 'manifest.json').read_text())['run_id']}"


@pytest.mark.parametrize(
    ("options", "left"),
    [
        (["--data.batch_size=5000"], set()),
        (["--callbacks.weight_continuity.every_n_steps=0"], set()),
        (["--data.batch_size=5000", "--run.dir=there/it/is"], set()),
        (["--data.batch_size=5000", "--run.dir=empty"], {"empty"}),
        (["--data.batch_size=5000", "--run.dir=mine"], {"mine", "mine/notes.txt", *BEGUN}),
    ],
)
def test_a_launch_that_never_trained_leaves_nothing_behind(
    geocont: Command, folder: Path, options: list[str], left: set[str]
) -> None:
    """Each misspelt path or wrong size left a directory that globs for reports met, and that refused the next try."""
    for name in sorted(left - set(BEGUN)):
        (folder / name).write_text("mine") if "." in name else (folder / name).mkdir()
    online = [part for part in SMALL if part != "--logger.wandb=null"]
    assert geocont("fit", *online, *steps(1), *options)[0] == 2
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if "wandb" not in path.parts}
    assert found == left


def test_a_launch_that_fails_keeps_what_it_has_computed(geocont: Command, folder: Path) -> None:
    """A run that ends at its first step has weights, and an error, that somebody wants to look at."""

    class Broken(Exception):
        """Stands for any error in the middle of training."""

    def fail(*_: object) -> None:
        raise Broken

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("geocont.modules.ResidualMLPModule.training_step", fail)
        with pytest.raises(Broken):
            geocont("fit", *SMALL, *steps(1), "--run.dir=run")
    assert json.loads((folder / "run/manifest.json").read_text())["status"] == "failed"
