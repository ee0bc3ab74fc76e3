"""What the real `wandb sync` uploads of offline runs, taken by a server on loopback that keeps every line and file."""

from __future__ import annotations

import bisect
import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb

import geocont.runs.wandb as module
from callbacks.media import Table, as_wandb
from geocont.runs.wandb import STEP, WandbRunLogger
from tests.conftest import SMALL
from tests.runs.test_wandb import read_history
from tests.runs.wandb_server import SyncServer, UploadedRun

RUN_ID = "abc"


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SyncServer]:
    with SyncServer(tmp_path_factory.mktemp("home")) as started:
        yield started


def session(run_dir: Path, steps: Iterable[int], run_id: str = RUN_ID) -> Path:
    """Logs one row for each step as a training does, with a table at the last one; returns the session's folder."""
    before = folders(run_dir)
    while any(time.strftime("%Y%m%d_%H%M%S") in folder.name for folder in before):
        time.sleep(0.05)  # W&B names a folder by the second it was started in
    logger = WandbRunLogger(mode="offline", run_dir=str(run_dir), run_id=run_id)
    for step in steps:
        logger.stage({"weight/v1/q": float(step), "weight/gap/q": 1.5}, step)
        logger.log_metrics({"train/loss": 1.0}, step=step)
    table = as_wandb(logger.experiment, "weight/pairs", Table(("step", "pair"), [(step, 0), (step, 1)]), step)
    logger.stage({"weight/pairs": table}, step + 1)
    logger.commit_staged(step + 1)
    logger.finish()
    wandb.teardown()  # the file's last block is written
    (added,) = set(folders(run_dir)) - set(before)
    return added


def folders(run_dir: Path) -> list[Path]:
    """The folders of a run's offline sessions, in the order they were started."""
    return sorted(run_dir.glob("wandb/offline-run-*"))


def sync(server: SyncServer, given: list[Path]) -> None:
    """Uploads the folders, and does not put up with an error, of which the exit status of `wandb sync` says nothing."""
    done = server.sync(given)
    assert done.returncode == 0, done.stderr
    assert "ERROR" not in done.stderr, done.stderr


def file_of(folder: Path) -> Path:
    return next(folder.glob("run-*.wandb"))


def steps_of(run: UploadedRun) -> list[int]:
    return [row[STEP] for row in run.rows()]


def assert_whole(server: SyncServer, parts: list[Path], run_id: str = RUN_ID) -> None:
    """The server has one run, with every row of every part once, in order, counted through, and the rows' files."""
    assert list(server.runs) == [run_id]
    run = server.runs[run_id]
    assert run.overwritten == []
    uploaded = [{key: value for key, value in row.items() if not key.startswith("_")} for row in run.rows()]
    rows = [(part, row) for part in parts for row in read_history(file_of(part))]
    assert uploaded == [row for _, row in rows]
    assert [row["_step"] for row in run.rows()] == list(range(len(rows)))
    files = [(part / "files", value["path"]) for part, row in rows for value in row.values() if isinstance(value, dict)]
    assert [run.files[path] for _, path in files] == [(folder / path).read_bytes() for folder, path in files]


def test_an_offline_run_arrives_whole(server: SyncServer, tmp_path: Path) -> None:
    """A run whose rows, tables or end stay behind when it is uploaded is found out when the disk has been cleared."""
    part = session(tmp_path / "run", range(5))
    sync(server, [part])
    assert_whole(server, [part])
    run = server.runs[RUN_ID]
    assert steps_of(run) == [0, 1, 2, 3, 4, 5]
    assert run.exit_codes == [0]
    (table,) = [json.loads(content) for name, content in run.files.items() if name.endswith(".table.json")]
    assert table == {"columns": ["step", "pair"], "data": [[4, 0], [4, 1]]}
    sync(server, [part])  # marked as synced
    assert len(run.rows()) == 6


@pytest.mark.parametrize("together", [True, False])
def test_the_parts_of_a_resumed_run_arrive_as_one(server: SyncServer, tmp_path: Path, together: bool) -> None:
    """Every session counts its rows from 0: two rows of a run had the same count, or one took another's place."""
    parts = [session(tmp_path / "run", steps) for steps in (range(4), range(5, 9), range(10, 12))]
    for given in [parts[::-1]] if together else [[part] for part in parts]:
        sync(server, given)
    assert_whole(server, parts)
    assert steps_of(server.runs[RUN_ID]) == list(range(13))
    assert server.runs[RUN_ID].exit_codes == [0, 0, 0]
    summary = json.loads(server.runs[RUN_ID].files["wandb-summary.json"])
    assert (summary["weight/v1/q"], summary["_step"]) == ({"min": 10, "max": 11, "last": 11}, 12)  # of the last session


def half_a_record(folder: Path) -> Path:
    """Leaves of a session's file what a kill leaves: no end, and the last row but one without its last byte."""
    path = file_of(folder)
    whole, rows = path.read_bytes(), len(read_history(path))

    def rows_within(size: int) -> int:
        path.write_bytes(whole[:size])
        return len(read_history(path))

    size = bisect.bisect_right(range(len(whole)), rows - 2, key=rows_within) - 1
    assert rows_within(size) == rows - 2
    return folder


def test_the_parts_of_a_killed_and_resumed_run_arrive_as_one(server: SyncServer, tmp_path: Path) -> None:
    """`wandb sync` stops at half a record and uploads no later part, so `--resume` cuts it off."""
    killed = half_a_record(session(tmp_path / "run", range(6)))
    written = [row[STEP] for row in read_history(file_of(killed))]
    resumed = session(tmp_path / "run", range(3, 9))  # from a checkpoint before the kill
    sync(server, [killed, resumed])
    assert_whole(server, [killed, resumed])
    assert written == [0, 1, 2, 3, 4]
    assert steps_of(server.runs[RUN_ID]) == [*written, *range(3, 10)]
    assert server.runs[RUN_ID].exit_codes == [1, 0]


def test_client_stops_at_half_a_record(server: SyncServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cutting it off rests on: a client that goes on behind half a record would make that needless."""
    monkeypatch.setattr(module, "heal_earlier_parts", lambda *_: None)
    killed = half_a_record(session(tmp_path / "run", range(6)))
    resumed = session(tmp_path / "run", range(3, 9))
    for attempt, given in enumerate(([killed], [killed, resumed]), 1):
        assert "incomplete record" in server.sync(given).stderr
        assert steps_of(server.runs[RUN_ID]) == list(range(5)) * attempt  # again, and nothing of the later part
    assert not list(tmp_path.glob("run/wandb/*/*.synced"))


def test_a_training_resumed_offline_arrives_as_one_run(
    server: SyncServer, tmp_path: Path, fit: Callable[..., Path], geocont: Callable[..., Any]
) -> None:
    """The id, the order and the counts of rows have to survive `--resume`, not only a logger made by hand."""
    every = ["--callbacks.weight_continuity.every_n_steps=2", "--callbacks.gradient_coherence.every_n_steps=2"]
    length = ["--trainer.max_epochs=-1", "--trainer.limit_val_batches=1", *every]
    online = [option for option in SMALL if option != "--logger.wandb=null"]
    run_dir = fit("run", *length, "--trainer.max_steps=4", base=online)
    status, out, err = geocont("fit", "--resume", str(run_dir), "--trainer.max_steps=8")
    assert status == 0, out + err
    wandb.teardown()
    parts = folders(run_dir)
    assert len(parts) == 2
    sync(server, parts)
    (run_id,) = server.runs
    assert_whole(server, parts, run_id)
    measured = [row[STEP] for row in server.runs[run_id].rows() if "weight/v1/hidden" in row]
    assert measured == [0, 1, 2, 4, 4, 6, 8]  # the last weights of a session, and the first of the next
