"""Sweeps: files that W&B's agents and ``geocont sweep`` run alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from geocont.conf import conf_folder
from geocont.errors import UserError
from geocont.experiments.sweep import arguments, flags, jobs, read_sweep, variant_of
from geocont.runs.store import read_metrics

Command = Callable[..., tuple[int, str, str]]
FILES = sorted((conf_folder() / "sweep").glob("*.yaml"))
TINY = """
method: grid
metric: {name: weight/v1/hidden, goal: maximize}
parameters:
  model.network.activation: {values: [relu, none]}
  callbacks.gradient_coherence: {value: "null"}
  seed_everything: {values: [3]}
command:
  - ${env}
  - geocont
  - fit
  - --config=conf/experiment/mlp/res_relu.yaml
  - --model.network.depth=3
  - --model.network.width=16
  - --logger.wandb=null
  - --trainer.accelerator=cpu
  - --trainer.max_epochs=-1
  - --trainer.max_steps=2
  - ${args}
"""


def agents_command(content: dict, chosen: dict) -> list[str]:
    """What W&B's own agent makes of a sweep's command and one choice of values."""
    utils = pytest.importorskip("wandb.sdk.launch.sweeps.utils")
    made = utils.create_sweep_command_args({"args": {name: {"value": value} for name, value in chosen.items()}})
    macros = {"${env}": ["/usr/bin/env"], "${args}": made["args"]}
    return [word for part in content["command"] for word in macros.get(part, [part])]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_agents_command_lines_are_ours_and_mean_what_they_say(path: Path, geocont: Command) -> None:
    """A misspelt or Python-formatted value of a sweep fails hours later, in every one of its runs."""
    assert path.read_text().splitlines()[0].startswith(f"# geocont sweep conf/sweep/{path.name}")
    content, sweep = yaml.safe_load(path.read_text()), read_sweep(str(path))
    grid = arguments(sweep)
    last = {name: values[-1] for name, values in sweep.parameters.items()}
    others = [last | {name: value} for name, values in sweep.parameters.items() for value in values]
    for chosen in [{name: values[0] for name, values in sweep.parameters.items()}, *others]:
        assert chosen in grid
        line = agents_command(content, chosen)
        assert line[:3] == ["/usr/bin/env", "geocont", "fit"]
        assert line[3:] == [*sweep.command, *flags(chosen)]
        status, out, err = geocont(*line[2:], "--print_config")
        assert status == 0, err
        config = yaml.safe_load(out)
        assert str(config["trainer"]["devices"]) == "1", "one GPU for each agent"
        for name, value in chosen.items():
            assert_there(config, name.split("."), yaml.safe_load(str(value)))
    assert len({job.name for job in jobs(sweep)}) == len(grid)


def assert_there(config: dict, keys: list[str], value: object) -> None:
    """Looks up ``model.network.scale`` as the command line means it: within ``init_args``."""
    for key in keys:
        config = config["init_args"] if key not in config else config
        config = config[key]
    if isinstance(value, dict):
        assert value.items() <= config["init_args"].items()
    else:
        assert config == value


def test_a_grid_runs_without_an_account_and_goes_on_where_it_was(geocont: Command, folder: Path) -> None:
    (folder / "tiny.yaml").write_text(TINY)
    status, out, err = geocont("sweep", "tiny.yaml", "--out=out", "--jobs=1", "--json=rows.json")
    assert status == 0, out + err
    rows = json.loads((folder / "rows.json").read_text())
    assert [(row["variant"], row["seed"]) for row in rows] == [
        ("activation=relu", 3),
        ("activation=none", 3),
    ]
    assert {row["model.network.activation"] for row in rows} == {"relu", "none"}
    assert not any(key.startswith("gradient/") for row in read_metrics(Path(rows[0]["run"])) for key in row)
    table = (folder / "out/table.md").read_text().splitlines()
    means = [float(line.split("|")[3].split("±")[0]) for line in table[2:]]
    assert means == sorted(means, reverse=True)
    assert (folder / "out/tiny.png").stat().st_size > 10_000
    before = {path: path.stat().st_mtime_ns for path in (folder / "out/runs").rglob("metrics.jsonl")}
    assert len(before) == 2
    assert geocont("sweep", "tiny.yaml", "--out=out")[0] == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    (folder / "tiny.yaml").write_text(TINY.replace("max_steps=2", "max_steps=3"))
    status, _, err = geocont("sweep", "tiny.yaml", "--out=out")
    assert status == 2
    assert "out holds an experiment with command" in err


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("method: grid", "method: bayes", "method: only grid runs without a W&B server, got 'bayes'"),
        ("{name: weight/v1/hidden, goal: maximize}", "{}", "metric: .* must name the key to compare by"),
        ("goal: maximize", "goal: best", "metric.goal must be minimize or maximize, got 'best'"),
        ('{value: "null"}', "{values: [null, 1]}", "parameters.callbacks.gradient_coherence: .* would write None"),
        ("{values: [relu, none]}", "{min: 0, max: 1}", "parameters.model.network.activation: a grid needs `values"),
        ("{values: [relu, none]}", "{values: [relu, relu]}", "two trainings of tiny would be called activation=relu"),
        ("{values: [3]}", "{values: [3, x]}", "parameters.seed_everything: seeds are whole numbers, got 'x'"),
        ("- fit", "- train", "command: .*tiny.yaml must run"),
        ("parameters:", "parameters", "tiny.yaml is not YAML: "),
        ("parameters:", "values:", "tiny.yaml is not a sweep: it needs parameters"),
    ],
)
def test_what_only_a_server_could_do_is_named(tmp_path: Path, old: str, new: str, told: str) -> None:
    assert old in TINY
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY.replace(old, new))
    with pytest.raises(UserError, match=told):
        jobs(read_sweep(str(path)))


def test_names_are_short_and_tell_trainings_apart(tmp_path: Path) -> None:
    path = tmp_path / "tiny.yaml"
    rates = "  model.a.lr: {values: [0.1, 0.2]}\n  model.b.lr: {values: ['{x: 1}', 2]}\n  seed_everything"
    path.write_text(TINY.replace("  seed_everything", rates))
    sweep = read_sweep(str(path))
    assert variant_of(sweep, arguments(sweep)[0]) == "activation=relu,a.lr=0.1,b.lr=x_1"
    path.write_text(TINY.replace("[3]", "[3, 4]"))
    names = ["relu-seed3", "none-seed3", "relu-seed4", "none-seed4"]
    assert [job.name for job in jobs(read_sweep(str(path)))] == [f"activation={name}" for name in names]


def test_a_run_of_an_agent_keeps_the_agents_identity(fit: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B ignores a run id of ours in a sweep: a resumed run would have gone on as another one."""
    monkeypatch.setenv("WANDB_SWEEP_ID", "s")
    monkeypatch.setenv("WANDB_RUN_ID", "agents-own")
    run = fit("run", "--trainer.max_epochs=-1", "--trainer.max_steps=1", "--trainer.limit_val_batches=0")
    assert json.loads((run / "manifest.json").read_text())["run_id"] == "agents-own"
