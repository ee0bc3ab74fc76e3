"""Figures of an analysis: projections by pairs, paths of leading vectors through depth, shared bases."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from geocont.measures.continuity import chance
from geocont.pretrained.advisor import ERRORS, Advice, summarise_advice
from geocont.pretrained.analysis import Analysis

COLUMNS = 4  # panels side by side


def pair_map(analysis: Analysis) -> Figure:
    """Draws v1 and u1 of every projection and pair of layers; dimmed where a leading direction is ill-defined."""
    projections = list(analysis.summary)
    pairs = sorted({row["layer"] for row in analysis.rows})
    figure = Figure(figsize=(3.5 + 0.22 * len(pairs), 2.2 + 0.6 * len(projections)), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    for axes, measure, what in ((panels[0], "v1", "input side"), (panels[1], "u1", "output side")):
        values, defined = np.full((2, len(projections), len(pairs)), np.nan)
        for i, projection in enumerate(projections):
            for j, pair in enumerate(pairs):
                rows = [r for r in analysis.rows if r["projection"] == projection and r["layer"] == pair]
                found = [row[measure] for row in rows if row[measure] is not None]
                if found:
                    values[i, j] = np.mean(found)
                    defined[i, j] = np.mean([row["defined"] for row in rows])
        edges = np.arange(len(pairs) + 1), np.arange(len(projections) + 1)
        image = axes.pcolormesh(*edges, values, vmin=0, vmax=1, cmap="viridis")
        dimmed = np.where((defined >= 0.5) | np.isnan(values), np.nan, 1.0)
        axes.pcolormesh(*edges, dimmed, vmin=0, vmax=1, cmap="Greys_r", alpha=0.35)
        marks = [_theory(analysis, projection, measure) for projection in projections]
        axes.set_yticks(np.arange(len(projections)) + 0.5, marks)
        axes.invert_yaxis()
        axes.set_title(f"{measure}, {what}", fontsize=10)
    every = max(1, len(pairs) // 12)
    panels[1].set_xticks(np.arange(0, len(pairs), every) + 0.5, [str(pair) for pair in pairs[::every]])
    panels[1].set_xlabel("lower layer of the pair")
    figure.colorbar(image, ax=panels, label="|cos|; dimmed: s1/s2 < 1.02")
    figure.suptitle(f"{analysis.model}\nadjacent layers (*: where theory expects continuity)", fontsize=11)
    return figure


def _theory(analysis: Analysis, projection: str, measure: str) -> str:
    return f"{projection} *" if measure in analysis.summary[projection]["theory"] else f"{projection}  "


def trajectories(analysis: Analysis) -> Figure:
    """Draws the path of the leading vector of the theory's side through depth, on its first two principal axes.

    Signs are arbitrary: each vector is turned to make an acute angle with the one below it.
    """
    shown = [(p, _side(analysis, p)) for p in analysis.vectors if _side(analysis, p) in analysis.vectors[p]]
    columns = min(COLUMNS, max(1, len(shown)))
    rows = max(1, -(-len(shown) // columns))
    figure = Figure(figsize=(3.2 * columns, 3.1 * rows + 0.5), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    image = None
    for axes, (projection, side) in zip(panels, shown, strict=False):
        points, share = principal_plane(analysis.vectors[projection][side])
        axes.plot(*points.T, color="#999999", linewidth=0.8, zorder=1)
        image = axes.scatter(*points.T, c=np.arange(len(points)), cmap="viridis", s=22, zorder=2)
        for i in (0, len(points) - 1):
            axes.annotate(str(i), points[i], fontsize=8, xytext=(4, 4), textcoords="offset points")
        axes.set_title(f"{projection}: {side} ({share:.0%} of variance)", fontsize=10)
        axes.set_aspect("equal", "datalim")
        axes.tick_params(labelsize=7)
    for axes in panels[len(shown) :]:
        axes.set_axis_off()
    if image is not None:
        figure.colorbar(image, ax=panels.tolist(), label="layer")
    figure.suptitle(f"{analysis.model}\nleading vectors through depth, principal axes", fontsize=11)
    return figure


def _side(analysis: Analysis, projection: str) -> str:
    return str(analysis.summary[projection]["theory"].split()[0])


def principal_plane(vectors: np.ndarray) -> tuple[np.ndarray, float]:
    """Returns coordinates ``(L, 2)`` of vectors ``(L, d)`` on their principal axes, and the share of variance there."""
    turned = vectors.astype(np.float64).copy()
    for i in range(1, len(turned)):
        if turned[i] @ turned[i - 1] < 0:
            turned[i] *= -1
    centred = turned - turned.mean(0)
    u, s, _ = np.linalg.svd(centred, full_matrices=False)
    points = np.zeros((len(vectors), 2))
    kept = min(2, len(s))
    points[:, :kept] = u[:, :kept] * s[:kept]
    total = float((s**2).sum())
    return points, float((s[:2] ** 2).sum()) / total if total > 0 else 0.0


def comparison(analyses: Sequence[Analysis]) -> Figure:
    """Draws the mean of the theory's side for each projection of several models, with the level of chance."""
    projections = list(dict.fromkeys(p for analysis in analyses for p in analysis.summary))
    figure = Figure(figsize=(2 + 1.1 * len(projections), 3.6), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(analyses)
    for i, analysis in enumerate(analyses):
        positions = np.arange(len(projections)) + (i - (len(analyses) - 1) / 2) * width
        heights = [
            _number(analysis.summary[p][_side(analysis, p)]) if p in analysis.summary else np.nan for p in projections
        ]
        axes.bar(positions, heights, width, label=analysis.model)
    for i, projection in enumerate(projections):
        summary = next(a.summary[projection] for a in analyses if projection in a.summary)
        side = summary["theory"].split()[0]
        level = chance(side, summary["columns"] if side == "v1" else summary["rows"])
        axes.plot([i - 0.45, i + 0.45], [_number(level)] * 2, color="#666666", linestyle=(0, (1, 2)), linewidth=1)
    axes.set_xticks(range(len(projections)), projections)
    axes.set_ylim(0, 1)
    axes.set_ylabel("v1 of readers, u1 of writers")
    axes.set_title("mean over adjacent layers; dotted: chance", fontsize=11)
    axes.legend(fontsize=8)
    return figure


def advice_figure(advice: Advice, model: str) -> Figure:
    """Draws errors of shared bases at one rank, what they save, and the layers' scores."""
    table = summarise_advice(advice)
    names = [line["projection"] for line in table]
    figure = Figure(figsize=(13, 4.1), layout="constrained")
    errors, savings, layers = figure.subplots(1, 3)
    places = np.arange(len(names))
    for i, (key, label, colour) in enumerate(
        (
            ("error", "theory's side", "#0072B2"),
            ("error_wrong_side", "other side", "#D55E00"),
            ("error_random", "random basis", "#999999"),
        )
    ):
        errors.bar(places + (i - 1) * 0.27, [_number(line[key]) for line in table], 0.27, label=label, color=colour)
    errors.set_xticks(places, names)
    errors.set_ylim(0, 1.18)
    errors.set_ylabel("share of squared norm lost")
    errors.set_title("shared basis of an eighth of the side", fontsize=10)
    errors.legend(fontsize=8, ncols=3, loc="upper center")
    for i, (error, colour) in enumerate(zip(ERRORS, ("#009E73", "#E69F00", "#CC79A7"), strict=True)):
        values = [_number(line[f"saved_at_{error:g}"]) for line in table]
        savings.bar(places + (i - 1) * 0.27, values, 0.27, label=f"error {error:.0%}", color=colour)
    savings.axhline(0, color="black", linewidth=0.8)
    savings.set_xticks(places, names)
    savings.set_ylabel("share of parameters saved")
    savings.set_title("theory's side; below 0 it costs, none: not reached", fontsize=10)
    savings.legend(fontsize=8)
    ordered = sorted(advice.layers, key=lambda row: row["layer"])
    layers.bar([row["layer"] for row in ordered], [row["score"] for row in ordered], color="#56B4E9")
    layers.set_xlabel("layer")
    layers.set_ylabel("topk with neighbours, theory's side")
    layers.set_title("how much of a layer its neighbours have", fontsize=10)
    figure.suptitle(f"{model}\nshared bases of adjacent layers; weights only, no task was run", fontsize=11)
    return figure


def _number(value: float | None) -> float:
    return np.nan if value is None else value
