"""What a person reads when a run has ended."""

from __future__ import annotations

from pathlib import Path

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
    """Prints where a run lies, how its headline measures moved, and how to look at them."""
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
    command = dashboard_command(run_dir)
    if command:
        print(f"  dashboard: {command}")


def dashboard_command(run_dir: Path) -> str | None:
    """Returns the command for the run's dashboard in a terminal, live while it trains; None without W&B files."""
    folder = run_dir / "wandb"
    return f"wandb leet {folder}" if folder.is_dir() else None


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
