"""The resumable runner, with real trainings in real processes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from filelock import FileLock

from geocont.errors import UserError
from geocont.experiments import mlp
from geocont.experiments.runner import Job, Runner, is_done
from geocont.report.tables import as_csv, as_markdown, summarise_by_variant
from geocont.runs.store import read_metrics

REPRODUCE = [sys.executable, "-m", "geocont", "reproduce", "mlp", "--preset=smoke", "--out=out"]


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen([*REPRODUCE, *options], cwd=folder, text=True, **pipes)  # type: ignore[call-overload,no-any-return]


def test_killed_shared_and_repeated_starts_train_each_run_once(tmp_path: Path) -> None:
    """Experiments of hours are stopped and started again: nothing may be lost, and nothing trained twice."""
    options = ("--variants", "res_relu,res_none", "--json=rows.json")
    first = start(tmp_path, *options)
    runs = tmp_path / "out/runs"
    deadline = time.monotonic() + 60
    while not read_metrics(runs / "res_relu-seed0") and time.monotonic() < deadline:
        time.sleep(0.05)
    first.kill()
    first.wait()
    together = [start(tmp_path, *options) for _ in range(2)]
    outputs = [process.communicate(timeout=150)[0] for process in together]
    assert [process.returncode for process in together] == [0, 0], outputs
    ends = [json.loads((run / "manifest.json").read_text()) for run in sorted(runs.iterdir()) if run.is_dir()]
    assert [end["status"] for end in ends] == ["finished", "finished"]
    logs = [(run / "output.log").read_text() for run in sorted(runs.iterdir()) if run.is_dir()]
    assert all(log.count("\nfinished: ") == 1 for log in logs), logs
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("manifest.json")}
    again = start(tmp_path, *options)
    out = again.communicate(timeout=60)[0]
    assert again.returncode == 0
    assert {path: path.stat().st_mtime_ns for path in runs.rglob("manifest.json")} == before
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["variant"], row["seed"], row["status"]) for row in rows] == [
        ("res_relu", 0, "finished"),
        ("res_none", 0, "finished"),
    ]
    assert {"accuracy", "weight_v1", "gradient_v1_init", "cumulative_v1", "steps"} <= set(rows[0])
    assert rows[0]["steps"] == 88
    assert all(row["gradient_v1_init"] > 0.9 for row in rows)
    assert "Res+ReLU" in out
    assert re.search(r"dashboard \S*wandb leet out/runs/res_relu-seed0/wandb", out)
    for name in ("table.md", "table.csv", "runs.csv", "continuity.png"):
        assert (tmp_path / "out" / name).stat().st_size > 0
    other = start(tmp_path, "--data", "elsewhere/mnist")
    assert "out holds an experiment with data 'digits', not 'elsewhere/mnist'" in other.communicate(timeout=60)[0]
    assert other.returncode == 2


def test_a_terminated_runner_leaves_no_training_behind(tmp_path: Path) -> None:
    """Schedulers end jobs with SIGTERM: the trainings must save and end too, not go on where nobody sees them."""
    process = start(tmp_path, "--variants=res_relu")
    run = tmp_path / "out/runs/res_relu-seed0"
    deadline = time.monotonic() + 60
    while not read_metrics(run) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert not is_done(run)
    with FileLock(run / ".lock", timeout=0):
        pass  # held by a training that is alive


def test_what_keeps_a_training_from_starting_is_said_in_one_line(tmp_path: Path) -> None:
    process = start(tmp_path, "--variants=res_relu", "--data=./nowhere")
    out = process.communicate(timeout=90)[0]
    assert process.returncode == 2, out
    assert "geocont: error: res_relu-seed0: data.path: nowhere is not a folder" in out
    assert "Traceback" not in out


def test_a_failed_run_is_a_result_and_a_stopped_one_is_not(tmp_path: Path) -> None:
    for status, error, done in (
        ("finished", None, True),
        ("failed", "RuntimeError: NaN", True),
        ("failed", "UserError: data.path", False),
        ("interrupted", None, False),
        ("running", None, False),
    ):
        (tmp_path / "manifest.json").write_text(json.dumps({"run_id": "x", "status": status, "error": error}))
        assert is_done(tmp_path) == done, status
    assert not is_done(tmp_path / "nothing")


def test_jobs_come_seed_by_seed_and_bad_options_are_named(tmp_path: Path) -> None:
    jobs = mlp.jobs("cpu", None, ["res_relu", "res_none"], 2)
    assert [job.name for job in jobs] == ["res_relu-seed0", "res_none-seed0", "res_relu-seed1", "res_none-seed1"]
    with pytest.raises(UserError, match="--seeds must be at least 1, got 0"):
        mlp.jobs("cpu", None, ["res_relu"], 0)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--out: .*file/x cannot be made"):
        Runner(tmp_path / "file/x", {}, [Job("a", 0, ())])


def test_tables_count_failures_and_leave_out_what_is_missing() -> None:
    rows = [
        {"variant": "a", "seed": 0, "status": "finished", "x": 1.0},
        {"variant": "a", "seed": 1, "status": "finished", "x": 3.0},
        {"variant": "b", "seed": 0, "status": "failed", "x": None},
    ]
    a, b = summarise_by_variant(rows, ["x"])
    assert (a["x"], a["seeds"], a["failed"]) == (2.0, 2, 0)
    assert a["x_spread"] == pytest.approx(2**0.5)
    assert (b["x"], b["x_spread"], b["failed"]) == (None, None, 1)
    assert as_csv([a, b]).splitlines()[0] == "variant,seeds,failed,x,x_spread"
    assert as_markdown(["a", "b"], [["1", "22"]]) == "| a | b  |\n|---|----|\n| 1 | 22 |\n"
