"""Run directories: who holds them, and what becomes of a run whose holder dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from geocont.runs.directory import RunDirectory, RunOptions, read_manifest

HOLD = """
import sys
from geocont.runs.directory import RunDirectory, RunOptions
run = RunDirectory.create(RunOptions(dir=sys.argv[1]))
run.update_manifest(status="running")
print("holding", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("killed", [True, False])
def test_a_survivor_marks_the_run_of_a_killed_process_only(tmp_path: Path, killed: bool) -> None:
    """A run whose rank 0 was killed with -9 must not look as if it were running; one that lives is its own master."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "holding\n"
        if killed:
            os.kill(holder.pid, signal.SIGKILL)
            holder.wait()
        RunDirectory.open_beside(tmp_path / "run").close_abandoned("rank 0 is gone")
        manifest = read_manifest(tmp_path / "run")
        assert manifest["status"] == ("failed" if killed else "running")
        assert manifest.get("error") == ("rank 0 is gone" if killed else None)
        holder.kill()


def test_a_run_that_ended_keeps_its_ending(tmp_path: Path) -> None:
    """A survivor that comes late must not overwrite what the main process has said."""
    run = RunDirectory.create(RunOptions(dir=str(tmp_path / "run")))
    run.update_manifest(status="finished")
    run.release()
    RunDirectory.open_beside(tmp_path / "run").close_abandoned("rank 0 is gone")
    assert read_manifest(tmp_path / "run")["status"] == "finished"
