"""From a run's keys and arrays to the series of figures, and what the keys say of measures and projections."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from geocont.measures.continuity import chance
from geocont.report.figures import Figure, Series
from geocont.report.records import RunRecord, finite
from geocont.report.summary import expected_measure
from geocont.weights import ROLES

SIDE = "side that theory expects"


@dataclass(frozen=True)
class Fineness:
    """How many points a curve has, and how many steps the slider, at most: what keeps a report small."""

    points: int = 300
    frames: int = 60


def curves_of(runs: Sequence[RunRecord], key: str, fineness: Fineness, named: bool = True) -> list[Series]:
    """Returns a key over training, a series for each run that has values of it, with its name unless told otherwise."""
    found = []
    for run in runs:
        steps, values = run.curve(key)
        if any(value is not None for value in values):
            kept = thin(list(range(len(steps))), fineness.points)
            numbers = [None if values[i] is None else finite(values[i]) for i in kept]  # type: ignore[arg-type]
            series: Series = {"run": run.name} if named else {}
            found.append(series | {"step": [steps[i] for i in kept], "value": numbers})
    return found


def pairs_of(run: RunRecord, key: str, projection: str, steps: Sequence[int]) -> Series:
    """Returns the values of all pairs of layers at some steps, and where leading directions are defined."""
    family, _, name = key.split("/", 2)
    values = _as_of(run.arrays[key], steps)
    pairs = max(len(value) for value in values)
    known = run.arrays.get(f"{family}/defined/{name}")
    series: Series = {"projection": projection, "pair": [f"{i}-{i + 1}" for i in range(pairs)]}
    series["value"] = [_numbers(value, pairs) for value in values]
    if known:
        series["defined"] = [
            [int(flag > 0) for flag in flags[:pairs]] + [0] * (pairs - len(flags)) for flags in _as_of(known, steps)
        ]
    return series


def heads_of(run: RunRecord, key: str, steps: Sequence[int]) -> list[Series]:
    """Returns a stored table ``(L, H)`` at some steps, a series for each layer."""
    frames = [np.atleast_2d(frame) for frame in _as_of(run.arrays[key], steps)]
    layers, heads = (max(frame.shape[axis] for frame in frames) for axis in (0, 1))
    return [
        {
            "layer": layer,
            "head": list(range(heads)),
            "value": [_numbers(frame[layer], heads) if layer < len(frame) else [None] * heads for frame in frames],
        }
        for layer in range(layers)
    ]


def spectrum_of(run: RunRecord, key: str, steps: Sequence[int]) -> list[Series]:
    """Returns stored singular values ``(L, k)`` at some steps, a series for each layer, counted from 1."""
    series = heads_of(run, key, steps)
    return [{"layer": each["layer"], "index": [i + 1 for i in each["head"]], "value": each["value"]} for each in series]


def _numbers(values: np.ndarray, count: int) -> list[float | None]:
    found = [finite(float(value)) for value in np.ravel(values)[:count]]
    return [*found, *[None] * (count - len(found))]


def _as_of(steps: dict[int, np.ndarray], wanted: Sequence[int]) -> list[np.ndarray]:
    """Returns the array of each wanted step, or of the last one before it that has any."""
    known = sorted(steps)
    return [steps[max((step for step in known if step <= each), default=known[0])] for each in wanted]


def frames_of(runs: Sequence[RunRecord], keys: Sequence[str], fineness: Fineness) -> list[int]:
    """Returns the steps at which any of the keys has stored values."""
    steps = {step for run in runs for key in keys for step, array in run.arrays.get(key, {}).items() if array.size}
    return thin(sorted(steps), fineness.frames)


def thin(values: list[int], most: int) -> list[int]:
    """Returns at most so many values, evenly taken, first and last among them."""
    if len(values) <= most:
        return values
    return [values[i] for i in sorted({round(i) for i in np.linspace(0, len(values) - 1, most)})]


def expected_side(measure: str, projection: str) -> list[str]:
    """Returns the option of the expected side, if the measure is on it: ``u1`` for what writes, otherwise ``v1``."""
    return [SIDE] if measure == expected_measure(projection) else []


def chance_levels(runs: Sequence[RunRecord], family: str, measure: str, projection: str) -> dict[str, float]:
    """Returns the level of unrelated matrices, from the sizes of the stored vectors; nothing where they are unknown."""
    output_side = measure == "u1" or measure.endswith("_out")
    levels = []
    for run in runs:
        vectors = run.arrays.get(f"{family}/{'u1' if output_side else 'v1'}_vector/{projection}", {})
        level = chance(measure, next(iter(vectors.values())).shape[-1]) if vectors else None
        if level is not None and level not in levels:
            levels.append(level)
    return {"chance" + " " * i: level for i, level in enumerate(levels)}  # runs of several widths have several


def projections_of(runs: Sequence[RunRecord], beginning: str) -> list[str]:
    """Returns what follows the beginning of keys, up to the next slash, in the order in which a layer applies it."""
    place = beginning.count("/")
    found = {key.split("/")[place] for run in runs for key in run.keys(beginning)}
    return [name for name, _ in sorted(((name, "") for name in found), key=order_of)]


def stored(runs: Sequence[RunRecord], family: str, *measures: str) -> list[tuple[str, str]]:
    """Returns (measure, projection) of the per-pair values that are stored."""
    parts = (key.split("/") for run in runs for key in run.arrays)
    found = {(part[1], part[2]) for part in parts if len(part) == 3 and part[0] == family and part[1] in measures}
    return sorted(found, key=lambda pair: (measures.index(pair[0]), order_of((pair[1], ""))))


def stored_vectors(runs: Sequence[RunRecord], family: str, measure: str) -> Iterator[str]:
    """Yields the projections whose leading vectors are stored."""
    for _, projection in stored(runs, family, f"{measure}_vector"):
        yield projection


def order_of(item: tuple[str, str]) -> tuple[int, str]:
    """Orders projections as a layer applies them, unknown ones by name after them."""
    names = list(ROLES)
    return (names.index(item[0]) if item[0] in names else len(names), item[0])


def options_of(figures: Sequence[Figure], order: Sequence[str]) -> list[str]:
    """Returns the options of the select "Measure" that some figure has."""
    there = {option for figure in figures for option in figure.choice.get("Measure", [])}
    return [option for option in order if option in there]


def in_words(key: str) -> str:
    """Returns ``learning rate, muon`` for ``lr/muon``, ``perplexity per word, val`` for ``val/perplexity_per_word``."""
    section, _, name = key.partition("/")
    return f"learning rate, {name}" if section == "lr" else f"{name.replace('_', ' ')}, {section}"


def signed(series: Sequence[Series]) -> bool:
    """Tells whether any value is below 0."""
    return any(value is not None and value < 0 for each in series for value in each["value"])
