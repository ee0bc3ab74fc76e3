"""From the runs of an experiment to its figures, tables and the lines that say where they lie."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from geocont.experiments.runner import PLAN_FILE, Runner
from geocont.report.plots import Curve
from geocont.report.summary import dashboard_command
from geocont.report.tables import as_csv
from geocont.runs.files import write_atomically
from geocont.runs.store import read_arrays, read_metrics


def pick(rows: Sequence[Mapping[str, Any]], key: str, position: int = -1) -> float | None:
    """Returns the first (0) or last (-1) value of a key in a run's rows, None where it has none."""
    values = [row[key] for row in rows if key in row]
    return values[position] if values else None


def curve(run_dir: Path, key: str) -> Curve:
    """Returns a key's values over the steps of a run."""
    points = [(row["step"], row[key]) for row in read_metrics(run_dir) if row.get(key) is not None]
    steps, values = zip(*points, strict=True) if points else ((), ())
    return Curve(np.array(steps), np.array(values))


def mean_of_seeds(runs: Sequence[str | Path], key: str) -> tuple[list[int], np.ndarray]:
    """Returns the steps ``(T,)`` at which all runs measured an array, and its mean over runs, ``(T, P)``."""
    found = [read_arrays(run, key) for run in runs]
    found = [arrays for arrays in found if arrays]
    steps = sorted(set.intersection(*(set(arrays) for arrays in found))) if found else []
    values = [np.mean([arrays[step] for arrays in found], axis=0) for step in steps]
    return steps, np.stack(values) if values else np.zeros((0, 0))


def separates(values: Sequence[float], chance: float, deviation: float, level: float = 0.01) -> bool | None:
    """Tells whether seeds lie above chance: one-sided t test of their mean; None for fewer than two seeds.

    Args:
        values: One of each seed.
        chance: Mean for unrelated random directions.
        deviation: Standard deviation of one such value. The spread of the seeds counts as at least that, so that three
            seeds that happen to agree prove nothing.
        level: Probability of a wrong yes.
    """
    from scipy.stats import t

    if len(values) < 2:
        return None
    error = max(statistics.stdev(values), deviation) / len(values) ** 0.5
    return bool(t.sf((statistics.fmean(values) - chance) / error, len(values) - 1) < level)


def difference(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Returns the mean of paired differences, at least two, and half the width of its confidence interval."""
    from scipy.stats import t

    error = statistics.stdev(values) / len(values) ** 0.5
    return statistics.fmean(values), float(t.ppf((1 + confidence) / 2, len(values) - 1)) * error


def run_title(what: str, runner: Runner, rows: Sequence[Mapping[str, Any]], ranges: bool = False) -> str:
    """Returns a figure's title: what was trained, preset, data, number of seeds, and whether their range is shown."""
    plan = json.loads((runner.out / PLAN_FILE).read_text(encoding="utf-8"))
    seeds = len({row["seed"] for row in rows})
    of = "1 seed" if seeds == 1 else f"mean of {seeds} seeds" + ", and their range" * ranges
    return f"{what}, preset {plan['preset']}, {Path(plan['data']).name}: {of}"


def publish(
    out: Path,
    rows: Sequence[Mapping[str, Any]],
    table: Sequence[Mapping[str, Any]],
    markdown: str,
    note: str,
    figures: Sequence[Path],
    console: Console,
) -> None:
    """Writes ``runs.csv``, ``table.csv`` and ``table.md`` into a folder, prints the table and where everything lies."""
    write_atomically(out / "runs.csv", as_csv(rows))
    write_atomically(out / "table.csv", as_csv(table))
    write_atomically(out / "table.md", markdown)
    console.print(f"\n{markdown}", soft_wrap=True)
    console.print(note, soft_wrap=True)
    console.print(f"runs      {out / 'runs'}\ntables    {out / 'table.md'}, table.csv, runs.csv", soft_wrap=True)
    for figure in figures:
        console.print(f"figure    {figure}", soft_wrap=True)
    dashboards = filter(None, (dashboard_command(Path(row["run"])) for row in rows))
    console.print(f"dashboard {next(dashboards, 'no W&B files')}", soft_wrap=True)
