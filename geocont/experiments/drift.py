"""Why continuity falls without symmetry breaking: do layers turn, or is their leading direction ill defined?

In residual MLPs without nonlinearity v1 rises to a plateau and falls. Two things could do that: the leading subspaces
of adjacent layers turn against each other (rotation drift), or s1 and s2 approach each other, and the leading vector is
any one of a subspace that the layers go on sharing (near-degeneracy). The squares of the cosines of v1 of a layer with
v1..v5 of the next add up to its share within that layer's leading subspace, so that the loss of <v1, v1'>^2 since the
plateau splits exactly into what went to v2..v5 (mixing) and what left the subspace (turning). And one arm forces a gap
s1/s2 from the plateau on: near-degeneracy cannot happen there, rotation drift can. This experiment is this project's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from geocont.experiments import mlp
from geocont.experiments.results import difference, mean_of_seeds, pick, publish, run_title
from geocont.experiments.runner import Grid, Runner, collect
from geocont.measures.continuity import TOP_K, chance
from geocont.report.plots import Curve, draw_curves, save_figure
from geocont.report.tables import as_markdown, mean_and_spread, summarise_by_variant
from geocont.runs.store import read_all_arrays, read_arrays, read_metrics

PLATEAU_FROM = 50  # optimizer step from which the highest v1 counts as the plateau: before, it is still random
RATIO, START = 1.2, 100  # the gap that is forced, and the step from which it is


@dataclass(frozen=True)
class Variant:
    """One row of the table: its label, how it differs from ``res_relu.yaml``, and whether a gap is forced."""

    label: str
    files: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    forced: bool = False


_BASES = {
    "none": Variant("Res+None", ("res_none.yaml",)),
    "radial": Variant("Res+Radial", ("res_radial.yaml",)),
    "relu": Variant("Res+ReLU"),
    "tanh": Variant("Res+Tanh", (), ("--model.network.activation=tanh",)),
    "nores_tanh": Variant("NoRes+Tanh", ("nores_tanh.yaml",)),
}
VARIANTS = {
    name + "_gap" * forced: Variant(base.label + ", gap forced" * forced, base.files, base.options, forced)
    for name, base in _BASES.items()
    for forced in (False, True)
    if name != "nores_tanh" or forced  # the control: a gap must not make continuity where there is none
}


PRESETS = {
    "smoke": mlp.Preset("digits", 1, 4, 1),
    "cpu": mlp.Preset("digits", 3, 84, 12),
    "paper": mlp.Preset("ylecun/mnist", 5, 84, 12),
}
#: Columns: at the plateau of v1, and at the end of training.
MOMENTS = ("v1", "topk", "within", "gap")
COLUMNS = (
    *(f"{name}_{moment}" for name in MOMENTS for moment in ("plateau", "end")),
    "plateau_step",
    "lost",
    "mixed",
    "turned",
    "mixed_share",
    "turn_v1",
    "turn_top5",
    "accuracy",
)
HEADER = (
    "variant",
    "seeds",
    "v1 at the plateau",
    "v1 at the end",
    "s1/s2, plateau",
    "s1/s2, end",
    "v1 within top 5, plateau",
    "end",
    "lost v1^2",
    "to v2..v5",
    "out of top 5",
    "turn of v1 in 50 steps",
    "of top 5",
)


def _arguments(name: str, data: str, size: mlp.Preset) -> list[str]:
    variant = VARIANTS[name]
    files = tuple(f"experiment/mlp/{file}" for file in variant.files)
    arguments = [*mlp.training_arguments(data, files, size.epochs(data)), *variant.options]
    arguments += ["--callbacks.gradient_coherence=null", "--callbacks.weight_continuity.full_every_n_firings=1"]
    if variant.forced:
        arguments += [f"--callbacks.spectral_gap.ratio={RATIO}", f"--callbacks.spectral_gap.start_step={START}"]
    return arguments


GRID = Grid("drift", PRESETS, _arguments)
plan, jobs = GRID.plan, GRID.jobs


def describe(run_dir: Path) -> dict[str, Any]:
    """Returns the figures of one run, None where it has none; cosines are means over pairs of adjacent layers."""
    figures: dict[str, Any] = dict.fromkeys(COLUMNS)
    figures["accuracy"] = pick(read_metrics(run_dir), "val/accuracy")
    arrays = read_all_arrays(run_dir, {"weight/v_vectors/hidden", "weight/gap/hidden"})
    vectors = arrays.get("weight/v_vectors/hidden", {})  # step -> (L, width, 5)
    gaps = arrays.get("weight/gap/hidden", {})
    late = [step for step in vectors if step >= PLATEAU_FROM]
    if len(late) < 2:
        return figures
    squares = {step: _squares(vectors[step]) for step in late}  # of cosines of v_i and v_j', (P, 5, 5)
    v1 = {step: float(np.sqrt(square[:, 0, 0]).mean()) for step, square in squares.items()}
    plateau, end = max(late, key=lambda step: v1[step]), late[-1]
    for moment, step in (("plateau", plateau), ("end", end)):
        square = squares[step]
        figures[f"v1_{moment}"] = v1[step]
        figures[f"topk_{moment}"] = float(square.sum((1, 2)).mean() / TOP_K)
        figures[f"within_{moment}"] = float(_within(square).mean())
        figures[f"gap_{moment}"] = float(gaps[step].mean())
    lost = float((squares[plateau] - squares[end])[:, 0, 0].mean())
    turned = figures["within_plateau"] - figures["within_end"]
    figures |= {"plateau_step": plateau, "lost": lost, "turned": turned, "mixed": lost - turned}
    figures["mixed_share"] = (lost - turned) / lost if lost > 0.05 else None  # of hardly anything it means nothing
    turns = [_turn(vectors[a], vectors[b]) for a, b in pairwise(late) if a >= plateau]
    if turns:
        figures["turn_v1"], figures["turn_top5"] = np.mean(turns, axis=0).tolist()
    return figures


def _squares(vectors: np.ndarray) -> np.ndarray:
    """Returns the squared cosines of v_i of a layer and v_j of the next, ``(L, d, 5) -> (L - 1, 5, 5)``."""
    return np.square(np.einsum("ldi,ldj->lij", vectors[:-1], vectors[1:]))


def _within(square: np.ndarray) -> np.ndarray:
    """Returns the share of each v1 within the neighbour's leading subspace, both ways, ``(P, 5, 5) -> (P,)``."""
    return (square[:, 0, :].sum(-1) + square[:, :, 0].sum(-1)) / 2


def _turn(before: np.ndarray, after: np.ndarray) -> tuple[float, float]:
    """Returns how far v1 and the leading subspace of a layer moved: 1 - <v1, v1'>^2 and 1 - their overlap."""
    square = np.square(np.einsum("ldi,ldj->lij", before, after))
    return float(1 - square[:, 0, 0].mean()), float(1 - square.sum((1, 2)).mean() / TOP_K)


def report(runner: Runner, console: Console) -> list[dict[str, Any]]:
    """Writes rows, table and figure below ``runner.out``, prints the table, and returns the rows of the ended runs."""
    rows = collect(runner, describe)
    if not rows:
        return []
    table = summarise_by_variant(rows, COLUMNS)
    markdown = as_markdown(HEADER, [_cells(summary) for summary in table])
    markdown += "".join(f"\n{line}\n" for line in _verdicts(rows))
    figure = _draw(runner, rows, runner.out / "drift.png")
    note = "lost v1^2 = to v2..v5 (near-degeneracy) + out of top 5 (rotation), from the plateau to the end of training"
    publish(runner.out, rows, table, markdown, note, [figure], console)
    return rows


def _cells(summary: dict[str, Any]) -> list[str]:
    runs = f"{summary['seeds']}" + (f" ({summary['failed']} failed)" if summary["failed"] else "")
    shown = (
        "v1_plateau",
        "v1_end",
        "gap_plateau",
        "gap_end",
        "within_plateau",
        "within_end",
        "lost",
        "mixed",
        "turned",
    )
    turns = (mean_and_spread(summary, name, 3) for name in ("turn_v1", "turn_top5"))
    return [VARIANTS[summary["variant"]].label, runs, *(mean_and_spread(summary, name) for name in shown), *turns]


def _verdicts(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Returns, for each variant with and without a forced gap, what forcing changed: paired by seed, 95 % intervals."""
    lines = []
    for name in ("none", "radial", "relu", "tanh"):
        pairs = [
            (forced["v1_end"], free["v1_end"])
            for forced in rows
            for free in rows
            if (free["variant"], forced["variant"]) == (name, f"{name}_gap") and free["seed"] == forced["seed"]
        ]
        known = [a - b for a, b in pairs if a is not None and b is not None]
        if len(known) > 1:
            mean, half = difference(known)
            lines.append(
                f"{VARIANTS[name].label}: a forced gap of {RATIO} changes v1 at the end by {mean:+.2f}"
                f" ± {half:.2f} (95 %, {len(known)} seeds)"
            )
    return lines


def _draw(runner: Runner, rows: list[dict[str, Any]], path: Path) -> Path:
    """Draws v1, its share within the neighbour's leading subspace, and s1/s2 over training."""
    figure = Figure(figsize=(15, 5.2), layout="constrained")
    panels = figure.subplots(1, 3)
    groups: list[dict[str, list[Curve]]] = [{}, {}, {}]
    for variant in dict.fromkeys(row["variant"] for row in rows):
        for run in [row["run"] for row in rows if row["variant"] == variant]:
            vectors = read_arrays(run, "weight/v_vectors/hidden")
            squares = {step: _squares(array) for step, array in vectors.items()}
            steps = np.array(list(squares))
            gap_steps, gaps = mean_of_seeds([run], "weight/gap/hidden")
            for group, curve in zip(
                groups,
                (
                    Curve(steps, np.array([np.sqrt(s[:, 0, 0]).mean() for s in squares.values()])),
                    Curve(steps, np.array([_within(s).mean() for s in squares.values()])),
                    Curve(np.array(gap_steps), gaps.mean(1) if len(gaps) else gaps),
                ),
                strict=True,
            ):
                group.setdefault(VARIANTS[variant].label, []).append(curve)
    draw_curves(panels[0], groups[0], "v1 of adjacent layers", "|cos|", chance("v1", mlp.WIDTH))
    draw_curves(panels[1], groups[1], "v1 within the neighbour's top 5", "squared projection", TOP_K / mlp.WIDTH)
    draw_curves(panels[2], groups[2], "s1/s2, mean over layers", "s1/s2", limits=None)
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=9, ncols=5, loc="outside lower center")
    figure.suptitle(run_title(f"Residual MLP, 16 x {mlp.WIDTH}", runner, rows, ranges=True), fontsize=12)
    save_figure(figure, path)
    return path
