"""What a person reads when a run has ended."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from geocont.measures.continuity import chance
from geocont.runs.directory import read_manifest
from geocont.runs.store import read_all_arrays, read_metrics
from geocont.weights import ROLES

#: Shown first to last, where a run has them: (key, what it is).
SHOWN = (("train/loss", "training loss"), ("val/accuracy", "accuracy"), ("val/perplexity", "perplexity"))
#: Families whose mean over projections, on the side that theory expects, is shown.
HEADLINES = (("weight", "continuity of weights"), ("gradient", "coherence of gradients"))
CHANGES = 5  # largest ones, that are named
SMALLEST_CHANGE = 0.02  # that is worth a line

#: Measures among which the largest change is looked for. Shares and cosines: the difference counts. Scales: the
#: logarithm to base 10 of the ratio, so that tenfold counts as much as from 0 to 1.
SHARES = (
    *(f"{family}/{measure}/" for family in ("weight", "gradient", "update") for measure in ("v1", "u1", "cosine")),
    *(f"softmax/{measure}/{part}" for measure in ("entropy", "saturated") for part in ("mean", "worst_head")),
)
SCALES = ("softmax/max_logit/worst_head", "spectrum/sigma_max/", "spectrum/stable_rank/")


@dataclass(frozen=True)
class Change:
    """How a measure moved over a run."""

    key: str
    first: float
    last: float

    @property
    def size(self) -> float:
        """What changes of different measures are compared by."""
        if not self.key.startswith(SCALES):
            return abs(self.last - self.first)
        return abs(math.log10(self.last / self.first)) if self.first > 0 and self.last > 0 else 0.0


def changed_most(rows: Sequence[Mapping[str, Any]], count: int) -> list[Change]:
    """Returns the largest changes from a measure's first value to its last, the largest first.

    Of each measure (``weight/v1``, ``spectrum/sigma_max`` ...) the projection or layer that changed most is named.
    """
    firsts: dict[str, float] = {}
    lasts: dict[str, float] = {}
    for row in rows:
        for key, value in row.items():
            if value is not None and key.startswith((*SHARES, *SCALES)) and _is_defined(key, row):
                firsts.setdefault(key, value)
                lasts[key] = value
    best: dict[str, Change] = {}
    for key, first in firsts.items():
        change = Change(key, first, lasts[key])
        measure = "/".join(key.split("/")[:2])
        if change.size >= SMALLEST_CHANGE and (measure not in best or change.size > best[measure].size):
            best[measure] = change
    return sorted(best.values(), key=lambda change: -change.size)[:count]


def _is_defined(key: str, row: Mapping[str, Any]) -> bool:
    """Tells whether a measure of leading directions stands on any pair of layers whose directions are defined."""
    family, measure, name = key.split("/", 2)
    return measure not in ("v1", "u1") or row.get(f"{family}/defined/{name}") != 0


def print_summary(run_dir: Path) -> None:
    """Prints where a run lies, how its headline measures moved, and how to look at them; draws its plots."""
    rows, arrays = read_metrics(run_dir), read_all_arrays(run_dir)
    print(f"\n{read_manifest(run_dir)['status']}: {run_dir}")
    for label, values, note in _headlines(rows, arrays):
        if values:
            print(f"  {label:48} {values[0]:8.4g} -> {values[-1]:<8.4g}{note}".rstrip())
    changes = changed_most(rows, CHANGES)
    if changes:
        print("  changed most:")
    for change in changes:
        print(f"    {change.key:46} {change.first:8.4g} -> {change.last:.4g}")
    plots = draw_plots(run_dir, arrays)
    if plots:
        print(f"  plots: {plots[0].parent}")
    print(f"  report: {our_command('geocont')} report {run_dir}")
    command = dashboard_command(run_dir)
    if command:
        print(f"  dashboard: {command}")


def _headlines(
    rows: Sequence[Mapping[str, Any]], arrays: Mapping[str, Mapping[int, np.ndarray]]
) -> list[tuple[str, list[float], str]]:
    """Returns what is shown of every run: label, values over training, and the chance level where there is one."""
    found = [(label, [row[key] for row in rows if row.get(key) is not None], "") for key, label in SHOWN]
    for family, label in HEADLINES:
        projections = sorted({key.split("/")[2] for row in rows for key in row if key.startswith(f"{family}/v1/")})
        keys = [f"{family}/{expected_measure(projection)}/{projection}" for projection in projections]
        values = [[row[key] for key in keys if row.get(key) is not None] for row in rows]
        means = [sum(each) / len(each) for each in values if each]
        if len(keys) == 1:
            _, measure, projection = keys[0].split("/")
            found.append((f"{label}, {measure} ({projection})", means, _chance(keys[0], arrays)))
        else:
            found.append((f"{label}, mean of {len(keys)} projections", means, ""))
    return found


def expected_measure(projection: str) -> str:
    """Returns the measure that theory expects to be high: ``u1`` where a projection writes, otherwise ``v1``."""
    return "u1" if ROLES.get(projection, ("mlp", "both"))[1] == "writes" else "v1"


def draw_plots(run_dir: Path, arrays: Mapping[str, Mapping[int, np.ndarray]]) -> list[Path]:
    """Draws a heat map of every pair over training for weights and gradients, ``plots/weight-v1-hidden.png`` ..."""
    from geocont.report.plots import heat_map, save_figure

    written = []
    for key in sorted(
        key for key in arrays if key.startswith(("weight/v1/", "weight/u1/", "gradient/v1/", "gradient/u1/"))
    ):
        family, measure, projection = key.split("/")
        pairs, known = arrays[key], arrays.get(f"{family}/defined/{projection}", {})
        if not next(iter(pairs.values())).size:
            continue
        values = np.stack(list(pairs.values()))
        defined = np.stack([known[step] > 0 for step in pairs])
        title = f"{measure} of adjacent layers' {family}s: {projection}"
        path = run_dir / "plots" / f"{family}-{measure}-{projection}.png"
        save_figure(heat_map(list(pairs), values, defined, title), path)
        written.append(path)
    return written


def dashboard_command(run_dir: Path) -> str | None:
    """Returns the command for the run's dashboard in a terminal, live while it trains; None without W&B files."""
    folder = run_dir / "wandb"
    return leet_command(folder) if folder.is_dir() else None


def leet_command(folder: Path) -> str:
    """Returns ``wandb leet FOLDER`` as it can be typed here."""
    return f"{our_command('wandb')} leet {folder}"


def our_command(name: str) -> str:
    """Returns a command of this environment as it can be typed here, whether or not the environment is active."""
    ours = Path(sys.executable).with_name(name)
    found = shutil.which(name)
    if found and Path(found) == ours:
        return name
    return str(ours.relative_to(Path.cwd()) if ours.is_relative_to(Path.cwd()) else ours)


def _chance(key: str, arrays: Mapping[str, Mapping[int, np.ndarray]]) -> str:
    family, measure, projection = key.split("/")
    vectors = list(arrays.get(f"{family}/{measure}_vector/{projection}", {}).values())
    level = chance(measure, vectors[-1].shape[-1]) if vectors else None
    return f"  (chance {level:.3f})" if level is not None else ""
