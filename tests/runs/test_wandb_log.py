"""Files of offline W&B runs that were killed: what is cut off, judged by W&B's own reader."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from geocont.runs.wandb import WandbRunLogger
from geocont.runs.wandb_log import cut_incomplete_record


def read(path: Path) -> tuple[list[str], str]:
    """The records of a file as W&B's reader prints them, and what it complains of."""
    command = [Path(sys.executable).with_name("wandb"), "leet", "inspect", "--json", path]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout.splitlines(), done.stderr


def written(folder: Path) -> Path:
    """The file of a run of several blocks."""
    logger = WandbRunLogger(mode="offline", run_dir=str(folder), run_id="abc")
    for step in range(40):
        logger.log_metrics({f"weight/v1/{layer}": 0.1 * layer for layer in range(60)}, step=step)
    logger.finish()
    return next(folder.glob("wandb/offline-run-*/run-abc.wandb"))


def test_a_half_written_record_is_cut_and_nothing_else(tmp_path: Path) -> None:
    """`wandb sync` stopped at such a record, and never uploaded the parts that a resumed run wrote later."""
    path = written(tmp_path)
    whole = path.read_bytes()
    assert len(whole) > 3 * 32768
    records, _ = read(path)
    for length in (32768 * 2, 32768 + 3, len(whole) - 1):
        path.write_bytes(whole[:length])
        before, complaint = read(path)
        assert "incomplete" in complaint
        assert cut_incomplete_record(path)
        after, complaint = read(path)
        assert complaint == ""
        assert after == before == records[: len(after)]
        assert not cut_incomplete_record(path)
    path.write_bytes(whole[:3])  # not even the file's own header
    assert not cut_incomplete_record(path)


def test_the_next_session_of_a_run_heals_the_last_one(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_bytes(path.read_bytes()[:-5])
    logger = WandbRunLogger(mode="offline", run_dir=str(tmp_path), run_id="abc")
    logger.log_metrics({"weight/v1/0": 1.0}, step=40)
    logger.finish()
    assert read(path)[1] == ""
    assert sorted(tmp_path.glob("wandb/offline-run-*-abc"))
