"""Figures as Vega-Lite specifications: the same ones are drawn by the page in a browser and by vl-convert as PNG.

The data of a figure are series: mappings from fields to a constant, to a list with a value for each row, or, where the
figure can be scrubbed through training, to a list of lists with one for each frame. :func:`rows_of` spreads them out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import wrap
from typing import Any, Literal

from geocont.report.themes import DASHES

Series = dict[str, Any]
Choice = dict[str, list[str]]

HEIGHT = 190  # pixels of the plotting area
LEGEND_WIDTH, SYMBOL_WIDTH = 265, 25  # pixels that a legend has at least, and that the line before a name takes
LONG_NAME = 16  # characters from which on two names do not fit beside each other
WRAPPED = 16  # characters of a line of a colour scale's title
MANY_LAYERS = 6  # from which on a legend names three of them

#: Marks of the steps' axis, which is logarithmic above 1: what happens early is what differs.
STEP_TICKS = [0, *(digit * 10**power for power in range(8) for digit in (1, 2, 5))]


@dataclass(frozen=True)
class Figure:
    """One figure of a report.

    Attributes:
        title: Above it.
        spec: Vega-Lite, its data left out.
        series: Its data.
        about: What it shows, for those who cannot see it.
        frames: Optimizer steps that it can be scrubbed through; none: it does not change.
        choice: Select -> the options with which it is shown; what is not named does not matter.
    """

    title: str
    spec: dict[str, Any]
    series: list[Series]
    about: str
    frames: list[int] = field(default_factory=list)
    choice: Choice = field(default_factory=dict)


def rows_of(series: Sequence[Series], frame: int = -1) -> list[dict[str, Any]]:
    """Returns the rows of one frame (the last one by default); page.js does the same."""
    rows = []
    for each in series:
        fields = {key: value[frame] if _is_framed(value) else value for key, value in each.items()}
        count = max((len(value) for value in fields.values() if isinstance(value, list)), default=1)
        rows += [
            {key: value[i] if isinstance(value, list) else value for key, value in fields.items()} for i in range(count)
        ]
    return rows


def _is_framed(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], list)


def step_axis(last: int) -> dict[str, Any]:
    """Returns the encoding of optimizer steps from 0 to ``last``."""
    ticks = [tick for tick in STEP_TICKS if tick <= max(last, 1)]
    axis = {"values": ticks, "labelOverlap": "greedy", "labelSeparation": 6, "format": ",d"}
    scale = {"type": "symlog", "constant": 1, "domain": [0, max(last, 1)], "nice": False}
    return {"field": "step", "type": "quantitative", "title": "optimizer step", "axis": axis, "scale": scale}


def curves(
    title: str,
    label: str,
    series: list[Series],
    runs: Sequence[str] = (),
    *,
    by: Literal["run", "layer"] = "run",
    dash: str | None = None,
    levels: Mapping[str, float] | None = None,
    scale: Literal["linear", "log", "symlog"] = "linear",
    domain: Sequence[float] | None = None,
    choice: Choice | None = None,
) -> Figure:
    """Returns curves over training.

    Args:
        title: Above the figure.
        label: Of the vertical axis, with the unit.
        series: Each with ``step`` and ``value`` ``(N,)``, and constants ``run`` or ``layer``.
        runs: Names of all runs of the report, so that each has one colour and dash in all figures.
        by: What colours tell apart.
        dash: Field that dashes tell apart; by default the one of the colours, where that is ``run``.
        levels: Label -> height of a horizontal line, such as chance.
        scale: Of the vertical axis.
        domain: Ends of the vertical axis; those of the data by default.
        choice: See :class:`Figure`.
    """
    last = max((max(each["step"]) for each in series if each["step"]), default=1)
    values = [value for each in series for value in each["value"] if value is not None]
    vertical: dict[str, Any] = {"type": scale, "nice": True} | ({"zero": False} if scale == "linear" else {})
    if domain is not None:
        vertical |= {"domain": list(domain), "nice": False}
    elif scale == "linear" and values:
        vertical |= _around(min(values), max(values))
    axis = {"format": ".0e", "tickCount": 5} if scale == "log" else {}
    largest = max(map(abs, values), default=1)
    if scale == "linear" and not 1e-2 <= largest < 1e6 and largest:  # learning rates would read 0
        axis = {"labelExpr": "datum.value ? format(datum.value, '.2~e') : '0'"}
    encoding: dict[str, Any] = {
        "x": step_axis(last),
        "y": {"field": "value", "type": "quantitative", "title": label, "scale": vertical, "axis": axis},
        "detail": [{"field": name} for name in ("run", "layer") if any(name in each for each in series)],
        "tooltip": _tooltip(label, series),
    }
    if by == "run":
        there = list(dict.fromkeys(each["run"] for each in series))
        names = list(runs) or there
        encoding["color"] = _nominal("run", names, there if len(names) > 1 else [])
        if dash is None and len(names) > 1:
            encoding["strokeDash"] = _dashed(_nominal("run", names, there))
    else:
        layers = [each["layer"] for each in series]
        encoding["color"] = layer_colour(max(layers, default=0))
    if dash is not None:
        kinds = list(dict.fromkeys(each[dash] for each in series))
        encoding["strokeDash"] = _dashed(_nominal(dash, kinds, kinds if len(kinds) > 1 else []))
    few = max((len(each["step"]) for each in series), default=0) <= 2
    dashes = {"strokeDash": encoding.pop("strokeDash")} if "strokeDash" in encoding else {}
    lines = {"mark": {"type": "line", "strokeWidth": 1.8, "clip": True}, "encoding": dashes}
    # What can be hovered over; to be seen only where a line would have no length.
    dot = {"type": "point", "filled": True, "size": 45, "opacity": 1 if few else 0}
    points = {"mark": dot | {"clip": domain is not None}}
    marks = [{"encoding": encoding, "layer": [lines, points]}]
    marks += [line for name, height in (levels or {}).items() for line in _level(name, height)]
    return Figure(
        title=title,
        spec={"width": "container", "height": HEIGHT, "layer": marks},
        series=series,
        about=f"{label} over optimizer steps 0 to {last}: {_told(series)}." if values else f"{label}: no values.",
        choice=choice or {},
    )


def cells(
    title: str,
    label: str,
    series: list[Series],
    *,
    rows: tuple[str, str],
    columns: tuple[str, str],
    frames: Sequence[int],
    domain: Sequence[float] | None,
    choice: Choice | None = None,
) -> Figure:
    """Returns a heat map that can be scrubbed through training.

    Args:
        title: Above the figure.
        label: Of the colours.
        series: Each with the fields of rows and columns, ``value`` for each frame, and, where directions may be
            undefined, ``defined`` for each frame: such cells are dimmed and crossed.
        rows: Field and label of the vertical axis.
        columns: Field and label of the horizontal axis.
        frames: Optimizer steps.
        domain: Ends of the colour scale; a negative first one makes it diverge around 0.
        choice: See :class:`Figure`.
    """
    diverging = domain is not None and domain[0] < 0
    colour: dict[str, Any] = {"range": "diverging" if diverging else "heatmap"}
    if domain is not None:
        colour |= {"domain": list(domain), "clamp": True}
    if diverging:
        colour["domainMid"] = 0
    names = [list(dict.fromkeys(_all(series, name))) for name, _ in (rows, columns)]
    height = max(90, min(26 * len(names[0]), 320))
    encoding: dict[str, Any] = {
        "x": _band(columns, names[1]) | {"axis": {"labelOverlap": "greedy", "labelSeparation": 8, "labelAngle": 0}},
        "y": _band(rows, names[0]),
        "color": {
            "field": "value",
            "type": "quantitative",
            "title": wrap(label, WRAPPED),
            "scale": colour,
            "legend": {"orient": "right", "gradientLength": 70, "titleLimit": 110, "format": ".3~g"},
        },
        "tooltip": [
            {"field": rows[0], "title": rows[1]},
            {"field": columns[0], "title": columns[1]},
            {"field": "value", "title": label, "format": ".3~g"},
        ],
    }
    layers: list[dict[str, Any]] = [{"mark": {"type": "rect"}, "encoding": encoding}]
    if any("defined" in each for each in series):
        encoding["opacity"] = {"condition": {"test": "datum.defined", "value": 1}, "value": 0.55}
        size = max(6, min(13, 200 // max(len(names[1]), 1)))  # so that crosses of many layers stay apart
        cross = {"type": "text", "text": "\u00d7", "fontSize": size, "tooltip": None}
        place = {name: encoding[name] for name in ("x", "y")}
        layers.append({"transform": [{"filter": "!datum.defined"}], "mark": cross, "encoding": place})
    return Figure(
        title=title,
        spec={"width": "container", "height": height, "layer": layers},
        series=series,
        about=f"{label} by {rows[1]} and {columns[1]}, at the step of the slider.",
        frames=list(frames),
        choice=choice or {},
    )


def trajectory(
    title: str, axes: Sequence[str], series: list[Series], frames: Sequence[int], choice: Choice | None = None
) -> Figure:
    """Returns the way of unit vectors through depth in a plane; it can be scrubbed through training.

    Args:
        title: Above the figure.
        axes: Labels of the two axes.
        series: One, with ``layer`` and ``label`` ``(L,)`` and, for each frame, ``x`` and ``y`` ``(L,)``.
        frames: Optimizer steps.
        choice: See :class:`Figure`.
    """
    ends = {"domain": [-1.05, 1.05], "nice": False}
    place: dict[str, Any] = {
        name: {"field": name, "type": "quantitative", "title": label, "scale": ends, "axis": {"tickCount": 5}}
        for name, label in zip("xy", axes, strict=True)
    }
    last = max(_all(series, "layer"), default=0)
    tooltip = [{"field": "layer"}, *({"field": name, "format": ".3f"} for name in "xy")]
    path = {"order": {"field": "layer"}, "color": {"value": "#8888"}}
    marks = [
        {"mark": {"type": "line", "strokeWidth": 1.2}, "encoding": place | path},
        {
            "mark": {"type": "point", "filled": True, "size": 60, "opacity": 0.95},
            "encoding": place | {"color": layer_colour(last, "bottom"), "tooltip": tooltip},
        },
        {
            "mark": {"type": "text", "dx": 8, "dy": -7, "fontSize": 11},
            "encoding": place | {"text": {"field": "label"}},
        },
    ]
    return Figure(
        title=title,
        spec={"width": 240, "height": 240, "layer": marks},
        series=series,
        about=f"Leading singular vectors of layers 0 to {last} in a plane, at the step of the slider.",
        frames=list(frames),
        choice=choice or {},
    )


def layer_colour(last: int, orient: str = "right") -> dict[str, Any]:
    """Returns the encoding of depth as a colour, for layers 0 to ``last``."""
    named = range(last + 1) if last < MANY_LAYERS else sorted({0, last // 2, last})
    legend = {"orient": orient, "gradientLength": 90, "values": [*named], "format": "d"}
    scale = {"domain": [0, max(last, 1)], "range": "ramp", "nice": False}
    return {"field": "layer", "type": "quantitative", "title": "layer", "scale": scale, "legend": legend}


def _around(low: float, high: float) -> dict[str, Any]:
    """Returns the ends of an axis for values that are all the same, for which Vega would write one rounded number."""
    largest = max(abs(low), abs(high))
    if high - low > 1e-4 * largest:
        return {}
    return {"domain": [low - largest / 10, high + largest / 10] if largest else [0, 1]}


def _nominal(name: str, domain: Sequence[str], shown: Sequence[str]) -> dict[str, Any]:
    """Returns the encoding of names as colours or dashes, with a legend of those shown; none: without a legend."""
    columns = 1 if max(map(len, shown), default=0) > LONG_NAME else 2
    legend = {"orient": "bottom", "columns": columns, "labelLimit": LEGEND_WIDTH // columns - SYMBOL_WIDTH}
    legend |= {"symbolType": "stroke", "symbolSize": 300, "values": list(shown)}
    found = {"field": name, "type": "nominal", "title": None, "scale": {"domain": list(domain)}}
    return found | {"legend": legend if shown else None}


def _dashed(encoding: dict[str, Any]) -> dict[str, Any]:
    scale = encoding["scale"]
    return encoding | {"scale": scale | {"range": [DASHES[i % len(DASHES)] for i in range(len(scale["domain"]))]}}


def _band(axis: tuple[str, str], values: Sequence[Any]) -> dict[str, Any]:
    return {"field": axis[0], "type": "ordinal", "title": axis[1], "sort": list(values)}


def _level(name: str, height: float) -> list[dict[str, Any]]:
    """Returns a horizontal line with its name beside the plot, where no curve runs through it."""
    colour = "#808080"  # seen on white and on black
    rule = {"type": "rule", "strokeDash": [2, 3], "strokeWidth": 1.2, "color": colour}
    text = {"type": "text", "align": "left", "baseline": "middle", "dx": 4, "fontSize": 10, "lineHeight": 11}
    text |= {"text": [name, f"{height:.3g}"], "color": colour}
    place = {"datum": height}
    return [
        {"data": {"values": [{}]}, "mark": rule, "encoding": {"y": place}},
        {"data": {"values": [{}]}, "mark": text, "encoding": {"y": place, "x": {"value": "width"}}},
    ]


def _tooltip(label: str, series: Sequence[Series]) -> list[dict[str, Any]]:
    constants = [name for name in ("run", "layer", "kind") if any(name in each for each in series)]
    numbers = [{"field": "step", "format": ",d"}, {"field": "value", "title": label, "format": ".4~g"}]
    return [*({"field": name} for name in constants), *numbers]


def _told(series: Sequence[Series]) -> str:
    """Returns first and last values of a few series in words."""
    parts = []
    for each in series[:4]:
        values = [value for value in each["value"] if value is not None]
        who = ", ".join(
            f"layer {each[key]}" if key == "layer" else str(each[key])
            for key in ("run", "layer", "kind")
            if key in each
        )
        parts.append(f"{who} from {values[0]:.3g} to {values[-1]:.3g}" if values else f"{who} without values")
    return "; ".join(parts) + (f"; and {len(series) - 4} more curves" if len(series) > 4 else "")


def _all(series: Sequence[Series], name: str) -> list[Any]:
    """Returns the values of a field that does not change from frame to frame."""
    found: list[Any] = []
    for each in series:
        value = each[name]
        found += value if isinstance(value, list) else [value]
    return found
