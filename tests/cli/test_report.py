"""``geocont report``: where it writes, what it says, and what it needs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Command = Callable[..., tuple[int, str, str]]
STEPS = ["--trainer.max_epochs=-1", "--trainer.max_steps=2", "--trainer.limit_val_batches=1"]


def test_a_report_lands_in_the_run_or_where_it_is_told(fit: Callable[..., Path], geocont: Command) -> None:
    pytest.importorskip("vl_convert")
    run = fit("run", *STEPS)
    status, out, err = geocont("report", "run")
    assert status == 0, err
    assert out.startswith("run/report.html (")
    assert (run / "report.html").read_text().startswith("<!doctype html>")
    (run / "manifest.json").unlink()
    status, out, _ = geocont("report", "run", "--format=png", "--out=pictures")
    assert status == 0
    assert "run: manifest.json is missing or unreadable." in out
    assert list((run.parent / "pictures").glob("*.png"))
    status, _, err = geocont("report", "run", "--out=run/config.yaml/x.html")
    assert (status, err) == (2, "geocont: error: --out: run/config.yaml/x.html cannot be written: File exists\n")


def test_errors_are_one_line_with_the_way_out(geocont: Command, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "run").mkdir()
    assert geocont("report")[0] == 2
    assert "did you mean --format?" in geocont("report", "run", "--fromat=png")[2]
    status, _, err = geocont("report", "run")
    assert status == 2
    assert err == "geocont: error: run: no readable manifest.json, metrics.jsonl or arrays/ of a run is in there\n"
    (folder / "run/metrics.jsonl").write_text('{"step": 0, "train/loss": 1.0}\n')
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    status, _, err = geocont("report", "run")
    assert status == 2
    assert "pip install 'geocont[report]' brings it" in err


def test_help_loads_no_torch(folder: Path) -> None:
    """Importing torch and lightning takes seconds, which a person who only asks for help should not wait."""
    code = (
        "import sys; from geocont.cli import main\n"
        "for command in ('report', 'dashboard', 'sweep'):\n"
        "    try: main([command, '--help'])\n    except SystemExit: pass\n"
        "heavy = {'torch', 'lightning', 'wandb', 'matplotlib', 'vl_convert', 'wandb_workspaces'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: geocont ") == 3
