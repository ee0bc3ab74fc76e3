"""Reading runs in any state, from the directories that real trainings leave."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from geocont.errors import UserError
from geocont.report.names import LONGEST, name_apart
from geocont.report.overview import guard_table
from geocont.report.records import read_run, read_runs
from geocont.report.sections import sections
from geocont.report.series import Fineness
from geocont.runs.store import read_all_arrays, read_arrays

Copy = Callable[..., Path]


def test_a_whole_run_has_no_problem_and_one_pass_reads_what_single_keys_read(trained: dict[str, Path]) -> None:
    run = read_run(trained["gpt2"], "gpt2")
    assert run.problems == ()
    assert run.config["model.init_args.network.width"] == 32
    assert {"q", "k", "v", "o", "up", "down"} == {key.split("/")[2] for key in run.keys("weight/v1/")}
    assert run.events[0]["cause"] == "max_logit"
    everything = read_all_arrays(trained["gpt2"])
    for key in ("weight/v1/q", "softmax/entropy/heads"):
        one = read_arrays(trained["gpt2"], key)
        assert one.keys() == everything[key].keys()
        assert all(np.array_equal(one[step], everything[key][step], equal_nan=True) for step in one)


def test_what_is_broken_becomes_a_sentence(copy_of: Copy, tmp_path: Path) -> None:
    """A colleague asks about the run that went wrong: a traceback instead of its report is the least useful answer."""
    crashed, one, cut, bare = (copy_of("mlp", name) for name in ("crashed", "one", "cut", "bare"))
    manifest = json.loads((crashed / "manifest.json").read_text())
    (crashed / "manifest.json").write_text(json.dumps(manifest | {"status": "failed", "error": "RuntimeError: boom"}))
    lines = (crashed / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    spoilt = [row | {"train/loss": None} if row["step"] >= 2 else row for row in rows]
    (crashed / "metrics.jsonl").write_text("\n".join(map(json.dumps, spoilt)) + '\n[3]\n{"a": 1}\n{"step": 9, "tr')
    (one / "metrics.jsonl").write_text(lines[0] + "\n")
    part = next((cut / "arrays").iterdir())
    part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
    (cut / "config.yaml").write_text("{ : [")
    for name in ("manifest.json", "config.yaml", "metrics.jsonl"):
        (bare / name).unlink()
    quiet = [{key: value for key, value in row.items() if not key.startswith("gradient/")} for row in rows]
    (copy_of("mlp", "quiet") / "metrics.jsonl").write_text("\n".join(map(json.dumps, quiet)))
    told = {run.path.name: " ".join(run.problems) for run in map(read_run, tmp_path.iterdir(), "abcde")}
    assert "The run failed: RuntimeError: boom" in told["crashed"]
    assert "Not finite (NaN or infinite): train/loss from step 2" in told["crashed"]
    assert "one row only, of step 0" in told["one"]
    assert "The store is cut short: " in told["cut"]
    assert "config.yaml cannot be read (" in told["cut"]
    assert "manifest.json is missing" in told["bare"]
    assert "no row" in told["bare"]
    assert "callbacks.gradient_coherence was on and has logged nothing" in told["quiet"]


def test_where_there_is_nothing_at_all_it_is_said_in_one_line(copy_of: Copy, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for paths, told in (
        ([tmp_path / "nowhere"], "nowhere is not a directory"),
        ([tmp_path / "empty"], r"empty: no readable manifest.json, metrics.jsonl or arrays/ of a run"),
        ([tmp_path / "empty", tmp_path / "." / "empty"], "given more than once"),
    ):
        with pytest.raises(UserError, match=told):
            read_runs(paths)
    runs = read_runs([copy_of("mlp", "a/x"), copy_of("mlp", "b/x"), tmp_path / "empty"])
    assert [run.name for run in runs] == ["a/x", "b/x", "empty"]


def test_what_is_no_number_is_left_out_and_told(copy_of: Copy) -> None:
    """A metrics.jsonl that another program wrote, or a broken guard.jsonl, ended a report with a traceback."""
    run = copy_of("gpt2", "strange")
    values = ("NaN", '"text"', "[1]", "{}", "Infinity")
    lines = [f'{{"step": {step}, "train/loss": {value}}}' for step, value in enumerate(values)]
    (run / "metrics.jsonl").write_text("\n".join(lines))
    (run / "guard.jsonl").write_text('{"step": 1, "others": 5}\n')
    record = read_run(run, "strange")
    assert record.curve("train/loss") == ([0, 1, 2, 3, 4], [None] * 5)
    assert "Not finite (NaN or infinite): train/loss from step 0" in " ".join(record.problems)
    titles = [figure.title for section in sections([record], Fineness()) for figure in section.figures]
    assert "train/loss" not in titles
    events = guard_table([record])
    assert events is not None
    assert events.body[0][-1] == "0"


@pytest.mark.parametrize(
    ("made", "names"),
    [
        ([("gpt2/hetero", "", 0), ("gpt2/stiefel", "", 0)], ["gpt2/hetero", "gpt2/stiefel"]),
        ([("mlp/a", "", 0), ("mlp/a", "", 1)], ["mlp/a, seed 0", "mlp/a, seed 1"]),
        ([("mlp/a", "", 0), ("mlp/a", "", 0)], ["mlp/a 00000000", "mlp/a 00000001"]),
        ([("mlp/a", "wide", 0), ("mlp/a", "", 0)], ["wide", "mlp/a"]),
        ([("mlp/a", "wide", 0), ("mlp/b", "wide", 0)], ["mlp/a/wide", "mlp/b/wide"]),
        ([("mlp/a", "x" * 50, 0), ("mlp/b", "y" * 50, 0)], [f"{each * 15}\u2026{each * 15}" for each in "xy"]),
    ],
)
def test_runs_are_called_what_tells_them_apart(made: list[tuple[str, str, int]], names: list[str]) -> None:
    """A legend of times and random identities told nobody which curve was which."""
    paths = [
        Path("/runs", experiment, "-".join(filter(None, ("20260101-120000", name, f"{number:08x}"))))
        for number, (experiment, name, _) in enumerate(made)
    ]
    manifests = [{"experiment": experiment, "seed": seed} for experiment, _, seed in made]
    assert name_apart(paths, manifests) == names
    copies = [Path("/there", path.name) for path in paths]
    every = name_apart([*paths, *copies], [*manifests, *manifests])
    assert len(set(every)) == 4
    assert max(map(len, every)) <= LONGEST + 3
