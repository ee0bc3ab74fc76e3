"""The report as PNG, an image for each figure that the page shows at first."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from geocont.report.figures import Figure, rows_of
from geocont.report.records import RunRecord
from geocont.report.sections import chosen_at_first, sections, shown_at_first
from geocont.report.series import Fineness
from geocont.report.themes import LIGHT
from geocont.report.vega import png

WIDTH = 460  # pixels of the plotting area


def write_images(runs: Sequence[RunRecord], folder: Path) -> list[Path]:
    """Writes ``01-train-loss.png`` ... into a folder, figures that can be scrubbed at their last step.

    Raises:
        OSError: The folder cannot be written.
        UserError: vl-convert is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    found = [
        (figure, ", ".join(chosen_at_first(section).values()))
        for section in sections(runs, Fineness())
        for figure in shown_at_first(section)
    ]
    for number, (figure, chosen) in enumerate(found, 1):
        name = re.sub(r"[^\w.-]+", "-", figure.title).strip("-").lower()[:60]
        path = folder / f"{number:02d}-{name}.png"
        path.write_bytes(_draw(figure, chosen))
        written.append(path)
    return written


def _draw(figure: Figure, chosen: str) -> bytes:
    """Draws a figure, with what is chosen on the page below its title."""
    at = f" at step {figure.frames[-1]:,}" if figure.frames else ""
    title = {"text": figure.title + at} | ({"subtitle": chosen} if chosen else {})
    spec = figure.spec | {"data": {"name": "rows", "values": rows_of(figure.series)}, "title": title}
    if spec["width"] == "container":
        spec["width"] = WIDTH
    return png(spec, LIGHT | {"background": "white"})
