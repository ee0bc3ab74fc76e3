"""Llama and its ablations: which projections line up through depth, and what they need for it (arXiv 2605.04971)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from geocont.conf import conf_folder
from geocont.experiments.results import mean_of_seeds, pick, publish, run_title, separates
from geocont.experiments.runner import Grid, Runner, TextSize, collect
from geocont.measures.continuity import chance, chance_deviation
from geocont.report.plots import draw_heat_map, draw_table, save_figure
from geocont.report.summary import expected_measure
from geocont.report.tables import as_csv, as_markdown, mean_and_spread, summarise_by_variant
from geocont.runs.files import write_atomically
from geocont.runs.store import read_all_arrays, read_metrics

PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")
SIDES = ("v1", "u1")
#: Whether the paper finds continuity there in trained transformers.
PAPER = {("v1", name): True for name in ("q", "k", "gate", "up")}
PAPER |= {("u1", "o"): True, ("u1", "down"): True, ("v1", "v"): False}

#: Variant -> the file beside ``baseline.yaml``, and what it stands for.
VARIANTS = {
    "baseline": "Llama",
    "relu": "ReLU",
    "gelu": "GELU",
    "identity": "no nonlinearity in the gate",
    "radial": "radial gate",
    "no_gate": "plain MLP",
    "linear_mlp": "plain MLP, no nonlinearity",
    "no_residual": "no residual connections",
    "no_attention_residual": "none around attention",
    "no_mlp_residual": "none around MLPs",
    "no_norm": "no RMSNorm",
    "qk_norm": "norm of q and k",
    "linear_attention": "no softmax",
    "linear": "no softmax, linear MLP",
}


PRESETS = {
    "smoke": TextSize(
        "stdlib", 1, ("--trainer.max_steps=10", "--trainer.val_check_interval=10", "--trainer.limit_val_batches=5")
    ),
    "cpu": TextSize("stdlib", 3),
    "paper": TextSize("Salesforce/wikitext", 3, small=False),
}

#: Columns of the rows are {family}_{side}_{projection}, at the end of training, and those with _init, before it.
FAMILIES = ("weight", "gradient", "cumulative")
HEADER = (
    "variant",
    "seeds",
    "validation loss",
    *(f"{expected_measure(p)} {p}" for p in PROJECTIONS),
)
DETAIL = (
    "projection",
    "measure",
    "chance",
    "before training",
    "after",
    "separates",
    "paper",
    "gradient, step 0",
    "gradient, end",
    "cumulative gradient",
)


def _arguments(name: str, data: str, size: TextSize) -> list[str]:
    folder = conf_folder() / "experiment/llama"
    files = ["baseline", *([name] if name != "baseline" else []), *(["cpu"] if size.small else [])]
    arguments = [word for file in files for word in ("--config", str(folder / f"{file}.yaml"))]
    if data != PRESETS["paper"].data:
        arguments += ["--data.path", data, "--data.config=null"]
    return [*arguments, *size.options]


GRID = Grid("llama", PRESETS, _arguments)
plan, jobs = GRID.plan, GRID.jobs


def describe(run_dir: Path) -> dict[str, Any]:
    """Returns the figures of one run, None where it has none."""
    rows = read_metrics(run_dir)
    figures: dict[str, Any] = {"val_loss": pick(rows, "val/loss"), "train_loss": pick(rows, "train/loss")}
    for projection in PROJECTIONS:
        for side in SIDES:
            for family in FAMILIES:
                figures[f"{family}_{side}_{projection}"] = pick(rows, f"{family}/{side}/{projection}")
            for family in ("weight", "gradient"):
                figures[f"{family}_{side}_{projection}_init"] = pick(rows, f"{family}/{side}/{projection}", 0)
    return figures | {"steps": rows[-1]["step"] if rows else 0}


def report(runner: Runner, console: Console) -> list[dict[str, Any]]:
    """Writes rows, tables and figures below ``runner.out``, prints the tables, and returns the ended runs' rows."""
    rows = collect(runner, describe)
    if not rows:
        return []
    levels = _levels(rows)
    columns = [key for key in rows[0] if key not in ("variant", "seed", "status", "run", "steps")]
    table = summarise_by_variant(rows, columns)
    detail = [line for summary in table for line in _detail(summary, rows, levels)]
    out = runner.out
    write_atomically(out / "projections.csv", as_csv(detail))
    first = table[0]["variant"]
    markdown = as_markdown(HEADER, [_cells(summary, rows, levels) for summary in table])
    markdown += f"\n{VARIANTS[first]}, every projection on both sides:\n\n"
    markdown += as_markdown(DETAIL, [_detail_cells(line) for line in detail if line["variant"] == first])
    figures = [_draw_training(runner, rows, first, levels, out / "llama.png")]
    figures.append(_draw_ablations(runner, table, rows, levels, out / "llama-ablations.png"))
    note = "*: above chance, one-sided t test over seeds at 1 %, the spread at least that of unrelated directions"
    publish(out, rows, table, markdown, note, figures, console)
    return rows


@dataclass(frozen=True)
class Level:
    """What unrelated directions would give: the mean, and its standard deviation over the pairs of a run."""

    mean: float
    deviation: float


def _levels(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, str], Level]:
    """Returns (side, projection) -> chance, from the leading vectors that the first complete run has stored."""
    levels: dict[tuple[str, str], Level] = {}
    for row in rows:
        keys = {f"weight/{side}_vector/{projection}" for side in SIDES for projection in PROJECTIONS}
        arrays = read_all_arrays(row["run"], keys)
        for projection in PROJECTIONS:
            for side in SIDES:
                vectors = list(arrays.get(f"weight/{side}_vector/{projection}", {}).values())
                if vectors and (side, projection) not in levels:
                    layers, dimension = vectors[0].shape
                    spread = chance_deviation(dimension) / max(1, layers - 1) ** 0.5
                    levels[side, projection] = Level(chance("v1", dimension) or 0.0, spread)
        if len(levels) == len(SIDES) * len(PROJECTIONS):
            break
    return levels


def _verdict(rows: Sequence[dict[str, Any]], variant: str, side: str, projection: str, level: Level | None) -> Any:
    values = [row.get(f"weight_{side}_{projection}") for row in rows if row["variant"] == variant]
    known = [value for value in values if value is not None]
    return separates(known, level.mean, level.deviation) if level and known else None


def _detail(summary: dict[str, Any], rows: Sequence[dict[str, Any]], levels: dict[Any, Level]) -> list[dict[str, Any]]:
    """Returns a row for each projection and side of a variant."""
    lines = []
    for projection in PROJECTIONS:
        for side in SIDES:
            key = f"{side}_{projection}"
            if summary.get(f"weight_{key}") is None:
                continue
            level = levels.get((side, projection))
            line = {"variant": summary["variant"], "projection": projection, "measure": side}
            line["chance"] = level.mean if level else None
            for column in (
                f"weight_{key}_init",
                f"weight_{key}",
                f"gradient_{key}_init",
                f"gradient_{key}",
                f"cumulative_{key}",
            ):
                short = column.replace(f"_{key}", "")
                line[short], line[f"{short}_spread"] = summary[column], summary[f"{column}_spread"]
            line["separates"] = _verdict(rows, summary["variant"], side, projection, level)
            line["paper"] = PAPER.get((side, projection))
            lines.append(line)
    return lines


def _detail_cells(line: dict[str, Any]) -> list[str]:
    words = {True: "yes", False: "no", None: "-"}
    verdict = words[line["separates"]]
    if None not in (line["separates"], line["paper"]) and line["separates"] != line["paper"]:
        verdict += " (differs)"
    return [
        line["projection"],
        line["measure"],
        f"{line['chance']:.3f}" if line["chance"] is not None else "-",
        mean_and_spread(line, "weight_init"),
        mean_and_spread(line, "weight"),
        verdict,
        words[line["paper"]],
        *(mean_and_spread(line, column) for column in ("gradient_init", "gradient", "cumulative")),
    ]


def _cells(summary: dict[str, Any], rows: Sequence[dict[str, Any]], levels: dict[Any, Level]) -> list[str]:
    runs = f"{summary['seeds']}" + (f" ({summary['failed']} failed)" if summary["failed"] else "")
    cells = [summary["variant"], runs, mean_and_spread(summary, "val_loss", 3)]
    for projection in PROJECTIONS:
        side = expected_measure(projection)
        verdict = _verdict(rows, summary["variant"], side, projection, levels.get((side, projection)))
        cells.append(mean_and_spread(summary, f"weight_{side}_{projection}") + ("*" if verdict else ""))
    return cells


def _draw_training(
    runner: Runner, rows: Sequence[dict[str, Any]], variant: str, levels: dict[Any, Level], path: Path
) -> Path:
    """Draws each projection's pairs of layers over training, the mean of all seeds, on the side that theory expects."""
    runs = [row["run"] for row in rows if row["variant"] == variant]
    figure = Figure(figsize=(14, 6.4), layout="constrained")
    panels = figure.subplots(2, 4).flat
    for axes, projection in zip(panels, PROJECTIONS, strict=False):
        side = expected_measure(projection)
        steps, values = mean_of_seeds(runs, f"weight/{side}/{projection}")
        level = levels.get((side, projection))
        title = f"{side} of {projection}" + (f" (chance {level.mean:.3f})" if level else "")
        image = draw_heat_map(axes, steps, values, title)
    last = list(figure.axes)[len(PROJECTIONS)]
    last.axis("off")
    figure.colorbar(image, cax=last.inset_axes((0.05, 0, 0.08, 1)), label="|cos| of adjacent layers")
    figure.suptitle(
        run_title("Llama" if variant == "baseline" else f"Llama, {VARIANTS[variant]}", runner, rows), fontsize=12
    )
    save_figure(figure, path)
    return path


def _draw_ablations(
    runner: Runner,
    table: Sequence[dict[str, Any]],
    rows: Sequence[dict[str, Any]],
    levels: dict[Any, Level],
    path: Path,
) -> Path:
    """Draws the mean continuity of each variant and projection as a coloured table."""
    values = np.full((len(table), len(PROJECTIONS)), np.nan)
    stars = np.zeros(values.shape, dtype=bool)
    for i, summary in enumerate(table):
        for j, projection in enumerate(PROJECTIONS):
            side = expected_measure(projection)
            mean = summary.get(f"weight_{side}_{projection}")
            values[i, j] = np.nan if mean is None else mean
            level = levels.get((side, projection))
            stars[i, j] = bool(_verdict(rows, summary["variant"], side, projection, level))
    figure = Figure(figsize=(9, 1.6 + 0.36 * len(table)), layout="constrained")
    labels = [VARIANTS[summary["variant"]] for summary in table]
    draw_table(figure.subplots(), labels, [f"{expected_measure(p)} {p}" for p in PROJECTIONS], values, stars)
    figure.suptitle(run_title("Llama", runner, rows) + "; *: above chance", fontsize=11)
    save_figure(figure, path)
    return path
