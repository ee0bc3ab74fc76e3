"""Figures: drawn without a display, with chance levels, axes and what is undefined."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from geocont.report.plots import Curve, as_pixels, draw_curves, heat_map, save_figure


def test_curves_have_labels_chance_and_the_range_of_seeds(tmp_path: Path) -> None:
    figure = Figure()
    axes = figure.subplots()
    steps = np.array([0, 1, 10])
    groups = {"a": [Curve(steps, np.array([0.1, 0.2, 0.9])), Curve(steps[:2], np.array([0.3, 0.4]))], "b": []}
    draw_curves(axes, groups, "title", "v1", chance=0.05)
    line, chance = axes.get_lines()
    assert line.get_xdata().tolist() == [0, 1]  # steps that all seeds have
    assert np.allclose(line.get_ydata(), [0.2, 0.3])
    assert "chance (0.050)" in chance.get_label()
    assert axes.get_xlabel() == "optimizer step"
    save_figure(figure, tmp_path / "plots/a.png")
    assert Image.open(tmp_path / "plots/a.png").size[0] > 300


def test_heat_map_dims_what_is_undefined_and_survives_missing_values() -> None:
    values = np.full((3, 4), 0.9)
    values[1, 2] = np.nan
    plain = as_pixels(heat_map([0, 50, 100], values, np.ones((3, 4), bool), "t"))
    dimmed = as_pixels(heat_map([0, 50, 100], values, np.zeros((3, 4), bool), "t"))
    assert plain.shape == dimmed.shape
    assert plain.dtype == np.uint8
    assert (plain != dimmed).any()
    assert as_pixels(heat_map([0], values[:1, :1], np.ones((1, 1), bool), "one value")).ndim == 3
