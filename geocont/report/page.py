"""The report as one HTML file that needs no network: text and tables in HTML, figures drawn by Vega in the browser."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from geocont import __version__
from geocont.report.figures import Figure
from geocont.report.overview import Table, config_differences, guard_table, overview_table
from geocont.report.records import RunRecord
from geocont.report.sections import Section, chosen_at_first, sections, shown_at_first
from geocont.report.series import Fineness
from geocont.report.themes import DARK, LIGHT
from geocont.report.vega import javascript

ASSETS = Path(__file__).parent / "assets"
LIMIT = 5_000_000  # bytes of a report
#: From fine to coarse: the first one that keeps a report below the limit is taken.
FINENESS = tuple(Fineness(points, frames) for points, frames in ((300, 60), (150, 40), (80, 25), (40, 12), (20, 6)))
#: Nothing is fetched, whatever a run's content may try.
POLICY = "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:"


def render(runs: Sequence[RunRecord]) -> str:
    """Returns the report of some runs as HTML, as fine as 5 MB allow."""
    page, before = "", FINENESS[0]
    for fineness in FINENESS:
        if len(page) * min(fineness.points / before.points, fineness.frames / before.frames) > LIMIT:
            continue  # too large even if all of the page shrank as its points do
        page, before = _page(runs, sections(runs, fineness)), fineness
        if len(page.encode()) <= LIMIT:
            break
    return page


def _page(runs: Sequence[RunRecord], found: Sequence[Section]) -> str:
    figures = [figure for section in found for figure in section.figures]
    steps = sorted({step for figure in figures for step in figure.frames})
    numbers = {id(figure): number for number, figure in enumerate(figures)}
    parts: list[tuple[str, str]] = [("Runs", _runs(runs))]
    parts += [(section.title, _section(section, numbers)) for section in found]
    parts += [
        ("Guard events", _table(guard_table(runs), "StabilityGuard reported nothing, or was off.")),
        ("Configuration differences", _table(config_differences(runs), _no_differences(runs))),
        ("Manifests and configurations", _manifests(runs)),
    ]
    names = ", ".join(run.name for run in runs)
    content = {
        "figures": [_plain(figure) for figure in figures],
        "steps": steps,
        "themes": {"light": LIGHT, "dark": DARK},
    }
    contents = "".join(f'<li><a href="#{_anchor(title)}">{_text(title)}</a></li>' for title, _ in parts)
    body = "".join(
        f'<section id="{_anchor(title)}" aria-labelledby="{_anchor(title)}-title">'
        f'<h2 id="{_anchor(title)}-title">{_text(title)}</h2>{inner}</section>'
        for title, inner in parts
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="geocont {__version__}">
<link rel="icon" href="data:,">
<title>{_text(names)} - geocont report</title>
<style>{(ASSETS / "page.css").read_text(encoding="utf-8")}</style>
</head>
<body>
<a class="skip" href="#{_anchor(parts[0][0])}">Skip to the content</a>
<header><h1>{_text(names)}</h1>
<p class="soft">Geometry of weight space in training, by geocont {__version__}</p></header>
<nav aria-label="Contents"><ol>{contents}</ol></nav>
<noscript><p class="missing">Figures need JavaScript; tables do not.</p></noscript>
{_scrubber(steps)}
<main>{body}</main>
<script type="application/json" id="content">{_script_json(content)}</script>
<script>{javascript()}</script>
<script>{(ASSETS / "page.js").read_text(encoding="utf-8")}</script>
</body>
</html>
"""


def _scrubber(steps: Sequence[int]) -> str:
    if not steps:
        return ""
    last = len(steps) - 1
    return (
        '<div id="scrubber" role="group" aria-label="Scrub through training"><div>'
        '<label for="step">Optimizer step</label>'
        f'<input id="step" type="range" min="0" max="{last}" value="{last}" step="1">'
        f'<output id="step-shown" for="step">{steps[-1]:,}</output>'
        '<button id="play" type="button">Play</button>'
        '<span class="soft">moves every figure with "at step"</span></div></div>'
    )


def _runs(runs: Sequence[RunRecord]) -> str:
    problems = "".join(
        f'<div class="problems" role="note"><strong>{_text(run.name)}</strong><ul>'
        + "".join(f"<li>{_text(problem)}</li>" for problem in run.problems)
        + "</ul></div>"
        for run in runs
        if run.problems
    )
    return problems + _table(overview_table(runs), "")


def _section(section: Section, numbers: Mapping[int, int]) -> str:
    first, chosen = {id(figure) for figure in shown_at_first(section)}, chosen_at_first(section)
    selects = "".join(
        f'<label>{_text(name)} <select name="{_text(name)}" autocomplete="off">'
        + "".join(
            f"<option{' selected' if option == chosen[name] else ''}>{_text(option)}</option>" for option in options
        )
        + "</select></label>"
        for name, options in section.selects.items()
        if len(options) > 1
    )
    figures = "".join(_figure(figure, numbers[id(figure)], id(figure) in first) for figure in section.figures)
    bar = f'<div class="selects">{selects}</div>' if selects else ""
    none = '<p class="none" role="status" hidden>Nothing was logged for this choice.</p>' if selects else ""
    return f'<p>{_text(section.text)}</p>{bar}{none}<div class="figures">{figures}</div>'


def _figure(figure: Figure, number: int, shown: bool) -> str:
    at = '<span class="at"></span>' if figure.frames else ""
    return (
        f'<figure id="figure-{number}" data-number="{number}"{"" if shown else " hidden"}>'
        f"<figcaption>{_text(figure.title)}{at}</figcaption>"
        f'<div class="plot" role="img" aria-label="{_text(figure.title)}. {_text(figure.about)}"></div></figure>'
    )


def _table(table: Table | None, otherwise: str) -> str:
    if table is None:
        return f"<p>{_text(otherwise)}</p>" if otherwise else ""
    head = "".join(f'<th scope="col">{_text(cell)}</th>' for cell in table.header)
    body = "".join(
        "<tr>"
        + f'<th scope="row">{_breakable(row[0])}</th>'
        + "".join(f"<td>{_breakable(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in table.body
    )
    return (
        f'<div class="table" tabindex="0" role="region" aria-label="{_text(table.about)}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _no_differences(runs: Sequence[RunRecord]) -> str:
    return "One run: nothing to compare." if len(runs) == 1 else "The configurations are the same."


def _manifests(runs: Sequence[RunRecord]) -> str:
    return "".join(
        f"<details><summary>{_text(run.name)}: {_text(what)}</summary>"
        f'<pre tabindex="0">{_text(json.dumps(value, indent=2, default=str))}</pre></details>'
        for run in runs
        for what, value in (("manifest.json", run.manifest), ("config.yaml", run.config))
        if value
    )


def _plain(figure: Figure) -> dict[str, Any]:
    return {
        "title": figure.title,
        "spec": figure.spec,
        "series": figure.series,
        "frames": figure.frames,
        "choice": figure.choice,
    }


def _text(value: Any) -> str:
    return html.escape(str(value), quote=True)


def _breakable(value: Any) -> str:
    """Returns text that breaks after dots, slashes and the like, rather than within words."""
    return re.sub(r"([./_=,](?=[A-Za-z]))", r"\1<wbr>", _text(value))


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def _script_json(value: Any) -> str:
    """Returns JSON that no content of a run can break out of."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
