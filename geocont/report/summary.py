"""What a person reads when a run has ended."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np

from geocont.measures.continuity import chance
from geocont.runs.directory import read_manifest
from geocont.runs.store import read_arrays, read_metrics

#: Shown first to last, where a run has them: (beginning of the key, what it is).
SHOWN = (
    ("train/loss", "training loss"),
    ("val/accuracy", "accuracy"),
    ("val/perplexity", "perplexity"),
    ("weight/v1/", "continuity of weights, v1"),
    ("weight/u1/", "continuity of weights, u1"),
    ("gradient/v1/", "coherence of gradients, v1"),
)


def print_summary(run_dir: Path) -> None:
    """Prints where a run lies, how its headline measures moved, and how to look at them; draws its plots."""
    rows = read_metrics(run_dir)
    print(f"\n{read_manifest(run_dir)['status']}: {run_dir}")
    keys = {key for row in rows for key in row}
    for beginning, label in SHOWN:
        for key in sorted(key for key in keys if key.startswith(beginning)):
            values = [row[key] for row in rows if row.get(key) is not None]
            if values:
                print(
                    f"  {_label(label, key, run_dir):48} {values[0]:8.4g} -> {values[-1]:<8.4g}{_chance(key, run_dir)}"
                )
    plots = draw_plots(run_dir)
    if plots:
        print(f"  plots: {plots[0].parent}")
    command = dashboard_command(run_dir)
    if command:
        print(f"  dashboard: {command}")


def draw_plots(run_dir: Path) -> list[Path]:
    """Draws a heat map of every pair over training for weights and gradients, ``plots/weight-v1-hidden.png`` ..."""
    from geocont.report.plots import heat_map, save_figure

    written = []
    measured = {key for row in read_metrics(run_dir) for key in row}
    for key in sorted(
        key for key in measured if key.startswith(("weight/v1/", "weight/u1/", "gradient/v1/", "gradient/u1/"))
    ):
        family, measure, projection = key.split("/")
        pairs, known = read_arrays(run_dir, key), read_arrays(run_dir, f"{family}/defined/{projection}")
        if not pairs or not next(iter(pairs.values())).size:
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
    """Returns ``wandb leet FOLDER`` as it can be typed here, whether or not the virtual environment is active."""
    ours = Path(sys.executable).with_name("wandb")
    found = shutil.which("wandb")
    if found and Path(found) == ours:
        return f"wandb leet {folder}"
    return f"{ours.relative_to(Path.cwd()) if ours.is_relative_to(Path.cwd()) else ours} leet {folder}"


def _label(label: str, key: str, run_dir: Path) -> str:
    projection = key.split("/")[2] if key.count("/") == 2 else ""
    return f"{label} ({projection})" if projection else label


def _chance(key: str, run_dir: Path) -> str:
    if key.count("/") != 2:
        return ""
    family, measure, projection = key.split("/")
    vectors = list(read_arrays(run_dir, f"{family}/{measure}_vector/{projection}").values())
    level = chance(measure, vectors[-1].shape[-1]) if vectors else None
    return f"  (chance {level:.3f})" if level is not None else ""
