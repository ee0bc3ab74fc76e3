"""From the runs of an experiment to its figures, tables and the lines that say where they lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from geocont.report.plots import Curve
from geocont.report.summary import dashboard_command
from geocont.report.tables import as_csv
from geocont.runs.files import write_atomically
from geocont.runs.store import read_metrics


def absolute(data: str) -> str:
    """Returns a folder's path so that it means the same wherever the experiment is continued; names as they are."""
    return str(Path(data).resolve()) if Path(data).is_dir() else data


def pick(rows: Sequence[Mapping[str, Any]], key: str, position: int = -1) -> float | None:
    """Returns the first (0) or last (-1) value of a key in a run's rows, None where it has none."""
    values = [row[key] for row in rows if key in row]
    return values[position] if values else None


def curve(run_dir: Path, key: str) -> Curve:
    """Returns a key's values over the steps of a run."""
    points = [(row["step"], row[key]) for row in read_metrics(run_dir) if row.get(key) is not None]
    steps, values = zip(*points, strict=True) if points else ((), ())
    return Curve(np.array(steps), np.array(values))


def publish(
    out: Path,
    rows: Sequence[Mapping[str, Any]],
    table: Sequence[Mapping[str, Any]],
    markdown: str,
    note: str,
    figure: Path,
    console: Console,
) -> None:
    """Writes ``runs.csv``, ``table.csv`` and ``table.md`` into a folder, prints the table and where everything lies."""
    write_atomically(out / "runs.csv", as_csv(rows))
    write_atomically(out / "table.csv", as_csv(table))
    write_atomically(out / "table.md", markdown)
    console.print(f"\n{markdown}", soft_wrap=True)
    console.print(note, soft_wrap=True)
    console.print(f"runs      {out / 'runs'}\ntables    {out / 'table.md'}, table.csv, runs.csv\nfigure    {figure}")
    dashboards = filter(None, (dashboard_command(Path(row["run"])) for row in rows))
    console.print(f"dashboard {next(dashboards, 'no W&B files')}", soft_wrap=True)
