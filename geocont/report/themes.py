"""Colours and sizes of the figures, on light and on dark paper; told apart by colour-blind people (Okabe and Ito)."""

from __future__ import annotations

from typing import Any

FONT = "system-ui, DejaVu Sans, sans-serif"
#: One fewer than there are colours, so that thirty runs differ in one or the other.
DASHES = [[1, 0], [7, 3], [2, 2], [8, 3, 2, 3], [12, 4]]


def _theme(ink: str, soft: str, grid: str, colours: list[str], ramp: list[float]) -> dict[str, Any]:
    axis = {"labelColor": ink, "titleColor": ink, "tickColor": soft, "domainColor": soft, "gridColor": grid}
    return {
        "background": "transparent",
        "font": FONT,
        "axis": axis | {"labelFontSize": 11, "titleFontSize": 11, "titleFontWeight": 600, "titleLimit": 215},
        "axisY": {"minExtent": 30},  # so that plots below each other are of one width
        "legend": {
            "offset": 6,
            "layout": {"bottom": {"direction": "vertical", "anchor": "start"}},
            "labelColor": ink,
            "titleColor": ink,
            "labelFontSize": 11,
            "titleFontSize": 11,
        },
        "title": {"color": ink, "fontSize": 13, "subtitleColor": ink},
        "view": {"stroke": grid},
        "text": {"color": ink},
        "scale": {"continuousPadding": 0},
        "range": {
            "category": colours,
            "ramp": {"scheme": "viridis", "extent": ramp},
            "heatmap": {"scheme": "viridis"},
            "diverging": {"scheme": "blueorange"},
        },
    }


LIGHT = _theme(
    ink="#1b1e24",
    soft="#7a8290",
    grid="#e3e6eb",
    colours=["#0072B2", "#D55E00", "#00875F", "#B5478E", "#A87400", "#2E86BF"],
    ramp=[0.0, 0.85],
)
DARK = _theme(
    ink="#e6e8ec",
    soft="#8b93a1",
    grid="#333842",
    colours=["#56B4E9", "#E69F00", "#2FC49A", "#E08FC0", "#F0E442", "#FF8A5C"],
    ramp=[0.3, 1.0],
)
