"""``geocont bench ddp``: the shape of its rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest


def test_rows_have_what_is_promised(geocont: Callable[..., tuple[int, str, str]], folder: Path) -> None:
    options = ("--ranks=2", "--layers=1", "--width=16", "--repeats=2", "--json=rows.json")
    status, out, err = geocont("bench", "ddp", *options)
    assert status == 0, out + err
    rows = json.loads((folder / "rows.json").read_text())
    assert [row["name"] for row in rows] == ["single", "replicated", "sharded"]
    assert all(
        [*row] == ["name", "ranks", "every_n_steps", "ms_per_step", "overhead_percent", "peak_mb"] for row in rows
    )
    assert rows[0]["overhead_percent"] == 0
    assert rows[0]["peak_mb"] == pytest.approx(rows[1]["peak_mb"])
    assert rows[2]["peak_mb"] < 0.75 * rows[1]["peak_mb"]


def test_numbers_that_have_no_meaning_are_named(geocont: Callable[..., tuple[int, str, str]]) -> None:
    status, _, err = geocont("bench", "ddp", "--ranks", "2", "0")
    assert status == 2
    assert "--ranks must be at least 1, got 0" in err
