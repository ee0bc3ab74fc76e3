"""GPT-2 under the five assignments of constraints: which module belongs on which manifold (arXiv 2606.13276)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from callbacks.stability_guard import FILE as GUARD_FILE
from geocont.conf import conf_folder
from geocont.experiments.results import curve, pick, publish, run_title
from geocont.experiments.runner import Grid, Runner, TextSize, collect
from geocont.report.plots import Curve, draw_curves, save_figure
from geocont.report.tables import as_markdown, mean_and_spread, summarise_by_variant
from geocont.runs.store import read_arrays, read_metrics

SLOW_TENTH = 0.1  # quantile of the certified ratio over matrices and steps


@dataclass(frozen=True)
class Variant:
    """One row of the table: its configuration, an overlay of it, and the paper's validation loss (as it reports it)."""

    config: str
    overlay: str | None = None
    paper: str = "-"


VARIANTS = {
    "unconstrained": Variant("unconstrained", paper="3.3855"),
    "stiefel": Variant("stiefel", paper="3.3679"),
    "dgram": Variant("dgram", paper="unstable"),
    "hetero": Variant("hetero", paper="3.3544"),
    "hetero_inv": Variant("hetero_inv", paper="unstable"),
    "adamw": Variant("adamw"),
    "stiefel_dual_ascent": Variant("stiefel", "dual_ascent"),
    "hetero_dual_ascent": Variant("hetero", "dual_ascent"),
    "hetero_inv_dual_ascent": Variant("hetero_inv", "dual_ascent"),
}


PRESETS = {
    "smoke": TextSize("stdlib", 1, ("--trainer.max_steps=20", "--trainer.val_check_interval=20")),
    "cpu": TextSize("stdlib", 3),
    "paper": TextSize("Skylion007/openwebtext", 1, small=False),
}

#: Columns of the rows beside variant and seed: name -> key, whose last value counts.
COLUMNS = {
    "val_loss": "val/loss",
    "train_loss": "train/loss",
    "max_logit": "softmax/max_logit/worst_head",
    "top_probability": "softmax/top_probability/mean",
    "saturated": "softmax/saturated/mean",
    "entropy": "softmax/entropy/mean",
    "manifold_residual": "optim/manifold_residual/attention_worst",
    "skipped_steps": "optim/skipped_steps",
    "guard_first_step": "guard/first_step",
}
#: Further columns, worked out from more than one key.
DERIVED = ("sigma_max_q", "sigma_max_k", "certified_ratio_attention", "certified_ratio_mlp")
HEADER = (
    "variant",
    "seeds",
    "validation loss",
    "paper",
    "largest logit",
    "top probability",
    "saturated",
    "sigma_max q",
    "guard, step",
    "certified, attention",
    "certified, mlp",
)
PANELS: tuple[tuple[str, str, Any], ...] = (
    ("train/loss", "training loss, nats a token", {"limits": None}),
    ("softmax/max_logit/worst_head", "largest attention logit", {"limits": None, "scale": "log"}),
    ("softmax/top_probability/mean", "top attention probability", {}),
    ("spectrum/sigma_max/q", "sigma_max of q, largest layer", {"limits": None}),
)


def _arguments(name: str, data: str, size: TextSize) -> list[str]:
    conf, variant = conf_folder(), VARIANTS[name]
    arguments = ["--config", str(conf / f"experiment/gpt2/{variant.config}.yaml")]
    if size.small:
        arguments += ["--config", str(conf / "experiment/gpt2/cpu.yaml")]
    if variant.overlay:
        arguments += ["--config", str(conf / f"optim/{variant.overlay}.yaml")]
    return [*arguments, "--data.path", data, *size.options]


GRID = Grid("manifolds", PRESETS, _arguments)
plan, jobs = GRID.plan, GRID.jobs


def describe(run_dir: Path) -> dict[str, Any]:
    """Returns the figures of one run, None where it has none.

    ``sigma_max_q`` and ``sigma_max_k`` are the largest over layers at the end; ``certified_ratio_*`` is the 10th
    percentile over matrices and measured steps.
    """
    rows = read_metrics(run_dir)
    figures: dict[str, Any] = {column: pick(rows, key) for column, key in COLUMNS.items()}
    for projection in ("q", "k"):
        values = _largest(run_dir, projection).values
        figures[f"sigma_max_{projection}"] = float(values[-1]) if len(values) else None
    for module in ("attention", "mlp"):
        ratios = list(read_arrays(run_dir, f"optim/certified_ratio/{module}").values())
        figures[f"certified_ratio_{module}"] = (
            float(np.quantile(np.concatenate(ratios), SLOW_TENTH)) if ratios else None
        )
    return figures | {"guard": _first_event(run_dir), "steps": rows[-1]["step"] if rows else 0}


def _first_event(run_dir: Path) -> str | None:
    """Returns what StabilityGuard reported first: cause, layer and head."""
    path = run_dir / GUARD_FILE
    if not path.exists():
        return None
    event = json.loads(path.read_text(encoding="utf-8").splitlines()[0])
    names = [f"{name} {event[name]}" for name in ("layer", "head") if event[name] is not None]
    return " ".join([event["cause"], *names])


def _largest(run_dir: Path, projection: str) -> Curve:
    """Returns the largest sigma_max over layers, over the steps of a run."""
    prefix = f"spectrum/sigma_max/{projection}/"
    points = []
    for row in read_metrics(run_dir):
        values = [value for key, value in row.items() if key.startswith(prefix)]
        if values:
            points.append((row["step"], max(values)))
    return Curve(np.array([step for step, _ in points]), np.array([value for _, value in points]))


def report(runner: Runner, console: Console) -> list[dict[str, Any]]:
    """Writes rows, table and figure below ``runner.out``, prints the table, and returns the rows of the ended runs."""
    rows = collect(runner, describe)
    if not rows:
        return []
    table = summarise_by_variant(rows, [*COLUMNS, *DERIVED])
    for summary in table:
        summary["paper_val_loss"] = VARIANTS[summary["variant"]].paper
    figure = runner.out / "manifolds.png"
    _draw(runner, rows, figure)
    note = "certified: 10th percentile over matrices and steps of the share of the best possible descent"
    markdown = as_markdown(HEADER, [_cells(summary) for summary in table])
    publish(runner.out, rows, table, markdown, note, [figure], console)
    return rows


def _cells(summary: dict[str, Any]) -> list[str]:
    runs = f"{summary['seeds']}" + (f" ({summary['failed']} failed)" if summary["failed"] else "")
    return [
        summary["variant"],
        runs,
        mean_and_spread(summary, "val_loss", 3),
        summary["paper_val_loss"],
        mean_and_spread(summary, "max_logit", 1),
        *(mean_and_spread(summary, column) for column in ("top_probability", "saturated", "sigma_max_q")),
        mean_and_spread(summary, "guard_first_step", 0),
        *(mean_and_spread(summary, f"certified_ratio_{module}", 3) for module in ("attention", "mlp")),
    ]


def _draw(runner: Runner, rows: list[dict[str, Any]], path: Path) -> None:
    figure = Figure(figsize=(12, 8), layout="constrained")
    for axes, (key, label, options) in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        groups: dict[str, list[Curve]] = {}
        for row in rows:
            run = Path(row["run"])
            points = _largest(run, "q") if key.startswith("spectrum") else curve(run, key)
            groups.setdefault(row["variant"], []).append(points)
        draw_curves(axes, groups, label, label, **options)
    _mark_guard(figure.axes[0], rows)
    figure.axes[0].legend(loc="lower left", fontsize=8)
    figure.suptitle(run_title("GPT-2", runner, rows, ranges=True), fontsize=12)
    save_figure(figure, path)


def _mark_guard(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Marks on the curves of training loss where StabilityGuard first reported something, the mean over seeds."""
    drawn = {str(line.get_label()): line for line in axes.lines}
    label: str | None = "StabilityGuard"
    for variant, line in drawn.items():
        steps = [row["guard_first_step"] for row in rows if row["variant"] == variant]
        known = [step for step in steps if step is not None]
        if known:
            step, (x, y) = float(np.mean(known)), line.get_data()
            height = float(np.interp(step, np.asarray(x, dtype=float), np.asarray(y, dtype=float)))
            style = {"color": line.get_color(), "edgecolors": "black", "zorder": 5}
            axes.scatter([step], [height], marker="v", s=70, label=label, **style)  # type: ignore[arg-type]
            label = None
