"""Figures from run directories, drawn without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure

#: Okabe and Ito's colours, which colour-blind people tell apart, and three greys and browns, each with its own dash.
STYLES = (
    ("#0072B2", "-"),
    ("#D55E00", "--"),
    ("#009E73", "-."),
    ("#CC79A7", ":"),
    ("#E69F00", (0, (5, 1))),
    ("#56B4E9", (0, (3, 1, 1, 1))),
    ("#000000", (0, (1, 1))),
    ("#8C564B", (0, (6, 2, 1, 2))),
    ("#999999", (0, (3, 2))),
)


@dataclass(frozen=True)
class Curve:
    """Values over optimizer steps: ``steps`` (N,) and ``values`` (N,)."""

    steps: np.ndarray
    values: np.ndarray


def draw_curves(
    axes: Axes,
    groups: Mapping[str, Sequence[Curve]],
    title: str,
    label: str,
    chance: float | None = None,
    limits: tuple[float, float] | None = (0, 1.02),
    scale: Literal["linear", "log"] = "linear",
) -> None:
    """Draws the mean of each group of curves with the range of its members, over steps on a logarithmic axis.

    Args:
        axes: Where to draw.
        groups: Legend label -> the curves of its seeds, measured at the same steps.
        title: Above the axes.
        label: Of the vertical axis.
        chance: Level for unrelated random matrices, drawn as a line.
        limits: Of the vertical axis; None for those of the data.
        scale: Of the vertical axis.
    """
    for (name, curves), (colour, dash) in zip(groups.items(), STYLES * len(groups), strict=False):
        steps = sorted(set.intersection(*(set(curve.steps.tolist()) for curve in curves))) if curves else []
        if not steps:
            continue
        values = np.stack([curve.values[np.isin(curve.steps, steps)] for curve in curves])
        axes.plot(steps, values.mean(0), color=colour, linestyle=dash, linewidth=1.8, label=name)
        axes.fill_between(steps, values.min(0), values.max(0), color=colour, alpha=0.2, linewidth=0)
    if chance is not None:
        axes.axhline(chance, color="#666666", linewidth=1, linestyle=(0, (1, 2)), label=f"chance ({chance:.3f})")
    axes.set_xscale("symlog", linthresh=1)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlim(left=0)
    axes.set_yscale(scale)
    if limits is not None:
        axes.set_ylim(*limits)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(label)
    axes.set_title(title, fontsize=11)
    axes.grid(alpha=0.25, linewidth=0.6)


def heat_map(steps: Sequence[int], values: np.ndarray, defined: np.ndarray, title: str) -> Figure:
    """Draws one measure of all pairs of layers over training.

    Args:
        steps: Optimizer steps of the columns, ``(T,)``.
        values: ``(T, P)`` for P pairs, from 0 to 1; NaN where there is no value.
        defined: ``(T, P)``, False where a leading direction is not well defined: such cells are dimmed.
        title: Above the map.
    """
    figure = Figure(figsize=(8, 1.6 + 0.16 * values.shape[1]), layout="constrained")
    axes = figure.subplots()
    image = draw_heat_map(axes, steps, values, title)
    edges = np.arange(len(steps) + 1)
    dimmed = np.where(defined.T | np.isnan(values.T), np.nan, 1.0)
    axes.pcolormesh(edges, np.arange(values.shape[1] + 1), dimmed, vmin=0, vmax=1, cmap="Greys_r", alpha=0.35)
    axes.set_xlabel("optimizer step (one column for each measurement)")
    figure.colorbar(image, ax=axes, label="|cos|; dimmed: s1/s2 < 1.02")
    return figure


def draw_heat_map(axes: Axes, steps: Sequence[int], values: np.ndarray, title: str) -> ScalarMappable:
    """Draws one measure of all pairs of layers over training, ``(T, P)`` from 0 to 1; returns it for a colour bar."""
    image = axes.pcolormesh(
        np.arange(len(steps) + 1), np.arange(values.shape[1] + 1), values.T, vmin=0, vmax=1, cmap="viridis"
    )
    shown = np.unique(np.linspace(0, len(steps) - 1, 6).astype(int)) if len(steps) else np.zeros(0, dtype=int)
    axes.set_xticks(shown + 0.5, [str(steps[i]) for i in shown])
    every = max(1, values.shape[1] // 12)
    pairs = range(0, values.shape[1], every)
    axes.set_yticks([pair + 0.5 for pair in pairs], [f"{pair}, {pair + 1}" for pair in pairs])
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("pair of layers")
    axes.set_title(title, fontsize=11)
    return image


def draw_table(
    axes: Axes, rows: Sequence[str], columns: Sequence[str], values: np.ndarray, marked: np.ndarray
) -> ScalarMappable:
    """Draws numbers from 0 to 1, ``(R, C)``, as a table coloured by them; marked ones get a star, NaN is left out."""
    image = axes.imshow(values, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    for i, j in np.argwhere(np.isfinite(values)):
        colour = "white" if values[i, j] < 0.6 else "black"
        text = f"{values[i, j]:.2f}" + ("*" if marked[i, j] else "")
        axes.text(j, i, text, ha="center", va="center", color=colour, fontsize=9)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0)
    return image


def as_pixels(figure: Figure) -> np.ndarray:
    """Returns a figure as an image, ``(height, width, 3)`` of bytes."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a figure as PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
