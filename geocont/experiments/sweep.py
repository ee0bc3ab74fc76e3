"""A W&B sweep file as a local experiment: the grid's trainings through the resumable runner, a table and a figure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from matplotlib.figure import Figure
from rich.console import Console

from geocont.conf import find_config
from geocont.errors import UserError
from geocont.experiments.results import curve, pick, publish
from geocont.experiments.runner import Job, Runner, collect
from geocont.report.plots import STYLES, Curve, draw_curves, save_figure
from geocont.report.tables import as_markdown, mean_and_spread, summarise_by_variant
from geocont.runs.store import read_metrics

SEED = "seed_everything"
#: Shown beside the metric, where runs have them.
COLUMNS = ("val/accuracy", "val/perplexity", "val/loss", "train/loss")
CURVES = 8  # variants whose curves are drawn, the best ones


@dataclass(frozen=True)
class Sweep:
    """What a sweep file says.

    Attributes:
        name: Of the file, without its ending.
        command: Options of ``geocont fit`` that all trainings share.
        parameters: Option -> its values, in the order of the file.
        metric: Key by whose last value trainings are compared.
        maximize: Whether more of it is better.
    """

    name: str
    command: tuple[str, ...]
    parameters: dict[str, tuple[Any, ...]]
    metric: str
    maximize: bool


def read_sweep(given: str) -> Sweep:
    """Reads a sweep file of W&B's format.

    Raises:
        UserError: It is no such file, or asks for what only a W&B server can do (anything but a grid).
    """
    path = find_config(given)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{given} is not YAML: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(content, dict) or not isinstance(content.get("parameters"), dict):
        raise UserError(f"{given} is not a sweep: it needs parameters, each with values, like conf/sweep/*.yaml")
    method = content.get("method")
    if method != "grid":
        raise UserError(
            f"method: only grid runs without a W&B server, got {method!r}; `wandb sweep {given}` takes others"
        )
    metric = content.get("metric")
    if not isinstance(metric, dict) or not isinstance(metric.get("name"), str):
        raise UserError(f"metric: {given} must name the key to compare by, such as {{name: val/loss, goal: minimize}}")
    goal = metric.get("goal", "minimize")
    if goal not in ("minimize", "maximize"):
        raise UserError(f"metric.goal must be minimize or maximize, got {goal!r}")
    parameters = {str(name): _values(str(name), entry) for name, entry in content["parameters"].items()}
    return Sweep(path.stem, _options(given, content.get("command")), parameters, metric["name"], goal == "maximize")


def _values(name: str, entry: Any) -> tuple[Any, ...]:
    if isinstance(entry, dict) and "value" in entry:
        return (entry["value"],)
    values = entry.get("values") if isinstance(entry, dict) else None
    if not isinstance(values, list) or not values:
        raise UserError(f"parameters.{name}: a grid needs `values: [...]` or `value: ...`, got {entry!r}")
    for value in values:
        if value is None or isinstance(value, dict):
            raise UserError(
                f"parameters.{name}: W&B's agent would write {value!r} as Python does; put it in quotes, as on the"
                ' command line: "null", "{every_n_steps: 50}"'
            )
    return tuple(values)


def _options(given: str, command: Any) -> tuple[str, ...]:
    words = [str(word) for word in command] if isinstance(command, list) else []
    for expected in (["${env}", "geocont", "fit"], ["geocont", "fit"]):
        if words[: len(expected)] == expected and "${args}" in words:
            return tuple(word for word in words[len(expected) :] if word != "${args}")
    raise UserError(f'command: {given} must run ["${{env}}", geocont, fit, ..., "${{args}}"], got {command!r}')


def arguments(sweep: Sweep) -> list[dict[str, Any]]:
    """Returns the grid: option -> value of every training, the last parameter running fastest."""
    names = list(sweep.parameters)
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*sweep.parameters.values())]


def flags(chosen: Mapping[str, Any]) -> list[str]:
    """Returns options as W&B's agent puts them in the place of ``${args}``."""
    return [f"--{name}={value}" for name, value in chosen.items()]


def variant_of(sweep: Sweep, chosen: Mapping[str, Any]) -> str:
    """Returns the name of a training without its seed: what varies, ``activation=relu,scale=0.02``."""
    varying = [name for name, values in sweep.parameters.items() if name != SEED and len(values) > 1]
    parts = [f"{_short(name, varying)}={_plain(chosen[name])}" for name in varying]
    return ",".join(parts) or sweep.name


def _plain(value: Any) -> str:
    """Returns a value as a part of a folder's name: ``every_n_steps_50`` for ``{every_n_steps: 50}``."""
    return re.sub(r"[^\w.+-]+", "_", str(value)).strip("_")


def _short(name: str, names: Sequence[str]) -> str:
    """Returns the shortest end of a dotted name that no other one has."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        end = parts[-count:]
        if sum(other.split(".")[-count:] == end for other in names) == 1:
            return ".".join(end)
    return name


def jobs(sweep: Sweep) -> list[Job]:
    """Returns the trainings of a sweep, seed by seed, so that a first comparison is there early.

    Raises:
        UserError: Two trainings would have the same name, or a seed is not a whole number.
    """
    found = []
    for chosen in arguments(sweep):
        seed = chosen.get(SEED, 0)
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise UserError(f"parameters.{SEED}: seeds are whole numbers, got {seed!r}")
        options = flags({name: value for name, value in chosen.items() if name != SEED})
        found.append(Job(variant_of(sweep, chosen), seed, (*sweep.command, *options)))
    names = [job.name for job in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise UserError(f"parameters: two trainings of {sweep.name} would be called {twice}; is a value there twice?")
    return sorted(found, key=lambda job: job.seed)


def plan(sweep: Sweep) -> dict[str, Any]:
    """Returns what identifies the experiment: trainings of another grid do not belong into the same folder."""
    parameters = {name: list(values) for name, values in sweep.parameters.items()}
    return {"sweep": sweep.name, "command": list(sweep.command), "parameters": parameters, "metric": sweep.metric}


def report(sweep: Sweep, runner: Runner, console: Console) -> list[dict[str, Any]]:
    """Writes rows, table and figure below ``runner.out``, prints the table, and returns the rows of the ended runs."""
    chosen = {variant_of(sweep, each): {k: v for k, v in each.items() if k != SEED} for each in arguments(sweep)}
    keys = list(dict.fromkeys((sweep.metric, *COLUMNS)))
    rows = collect(runner, lambda run: _last_values(run, keys))
    if not rows:
        return []
    there = [column for column in map(_column, keys) if any(row[column] is not None for row in rows)]
    columns = list(dict.fromkeys((_column(sweep.metric), *there)))
    rows = [row | chosen[row["variant"]] for row in rows]
    table = summarise_by_variant(rows, columns)
    sign = -1 if sweep.maximize else 1
    metric = _column(sweep.metric)
    table.sort(key=lambda summary: (summary[metric] is None, sign * (summary[metric] or 0.0)))
    header = ["variant", "seeds", *columns]
    body = [[summary["variant"], _count(summary), *(_cell(summary, name) for name in columns)] for summary in table]
    figure = runner.out / f"{sweep.name}.png"
    _draw(sweep, rows, [summary["variant"] for summary in table], figure)
    best = "largest" if sweep.maximize else "smallest"
    note = f"mean and standard deviation of the last values; {best} {sweep.metric} first"
    publish(runner.out, rows, table, as_markdown(header, body), note, [figure], console)
    return rows


def _last_values(run_dir: Path, keys: Sequence[str]) -> dict[str, Any]:
    rows = read_metrics(run_dir)
    return {_column(key): pick(rows, key) for key in keys} | {"steps": rows[-1]["step"] if rows else 0}


def _column(key: str) -> str:
    return key.replace("/", "_")


def _count(summary: Mapping[str, Any]) -> str:
    return f"{summary['seeds']}" + (f" ({summary['failed']} failed)" if summary["failed"] else "")


def _cell(summary: Mapping[str, Any], column: str) -> str:
    """Returns mean and spread with digits that suit the value."""
    mean = summary[column]
    return mean_and_spread(summary, column, 3 if mean is None or abs(mean) < 10 else 1)


def _draw(sweep: Sweep, rows: Sequence[Mapping[str, Any]], order: Sequence[str], path: Path) -> None:
    """Draws the metric over training for the best variants, and its last value for all of them."""
    figure = Figure(figsize=(13, max(4.4, 1.6 + 0.32 * len(order))), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.2, 1))
    groups: dict[str, list[Curve]] = {name: [] for name in order[:CURVES]}
    for row in rows:
        if row["variant"] in groups:
            groups[row["variant"]].append(curve(Path(row["run"]), sweep.metric))
    title = "over training" + (f", the best {CURVES} of {len(order)}" if len(order) > CURVES else "")
    draw_curves(left, groups, title, sweep.metric, limits=None)
    if left.get_lines():
        left.legend(fontsize=8)
    for place, name in enumerate(order):
        values = [row[_column(sweep.metric)] for row in rows if row["variant"] == name]
        finite = [value for value in values if value is not None and np.isfinite(value)]
        colour = STYLES[place % len(STYLES)][0] if place < CURVES else "#666666"
        right.plot(finite, [place] * len(finite), "o", color=colour, alpha=0.8)
    right.set_yticks(range(len(order)), order, fontsize=8)
    right.invert_yaxis()
    right.set_xlabel(f"last {sweep.metric}, one point a seed")
    right.set_title("at the end", fontsize=11)
    right.grid(alpha=0.25, linewidth=0.6)
    figure.suptitle(f"{sweep.name}: {sweep.metric}", fontsize=12)
    save_figure(figure, path)
