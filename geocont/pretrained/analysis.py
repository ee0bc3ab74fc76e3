"""The analysis of a checkpoint: one row for each projection and pair of layers, spectra, baselines, a summary."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from geocont.errors import UserError
from geocont.measures.continuity import chance
from geocont.pretrained.cache import ResultCache
from geocont.pretrained.checkpoint import Checkpoint, open_checkpoint
from geocont.pretrained.difference import differences
from geocont.pretrained.engine import Result, Settings, walk
from geocont.pretrained.hub import fetch_model, is_hub_name
from geocont.pretrained.layers import EXACT_SIDE, FULL, LIGHT
from geocont.pretrained.matrices import MatrixTable, find_matrices

#: Draws of the permutation baseline, and pairs of distant layers, at most.
DRAWS, DISTANT_PAIRS, SEED = 16, 2000, 20260504
THEORY = {"reads": "v1", "writes": "u1", "both": "v1 u1"}

Progress = Callable[[int, int, str], None]


@dataclass
class Analysis:
    """What was found of one checkpoint, or of the difference of two.

    Attributes:
        model: Its name.
        family: Its architecture.
        rows: One for each projection and pair of adjacent layers: ``model projection layer v1 u1 ...``; ``layer`` is
            the lower of the pair. A value that does not exist is None, and ``status`` says why.
        spectra: One for each projection and layer: ``sigma_max stable_rank effective_rank gap ... s01 .. s32``.
        summary: Projection -> means over its pairs, levels of chance, baselines, the side that theory predicts.
        vectors: Projection -> ``v1`` (layers, in) and ``u1`` (layers, out); of the first of several experts.
        notes: What a person should know, a line each.
    """

    model: str
    family: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)
    spectra: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, dict[str, Any]] = field(default_factory=dict)
    vectors: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def marked(self) -> list[dict[str, Any]]:
        """Rows whose matrices have no directions: not finite, or zero."""
        return [row for row in self.rows if row["status"] != "ok"]


def open_model(model: str | Path, revision: str | None = None) -> Checkpoint:
    """Opens a checkpoint by its path, or by its name on the Hugging Face hub (``owner/model``).

    Raises:
        UserError: There is none, or it is not whole.
    """
    if is_hub_name(str(model)):
        return open_checkpoint(fetch_model(str(model), revision), str(model))
    return open_checkpoint(Path(model))


def analyze(
    path: str | Path,
    *,
    against: str | Path | None = None,
    revision: str | None = None,
    own_map: str | Path | None = None,
    fold_norms: bool = False,
    projections: Sequence[str] | None = None,
    light: bool = False,
    exact_side: int = EXACT_SIDE,
    device: str = "cpu",
    cache: str | Path | None = None,
    progress: Progress | None = None,
    into: Analysis | None = None,
) -> Analysis:
    """Measures the continuity of a checkpoint's matrices through depth, one matrix at a time.

    Args:
        path: File, folder, folder of a geocont run, or name on the hub.
        against: Another checkpoint of the same model; then what is analysed is the difference, ``path`` - ``against``.
        revision: Branch, tag or commit on the hub.
        own_map: YAML file that says where the matrices lie, for architectures that are not known.
        fold_norms: Whether to multiply matrices by the norm weights before and after them.
        projections: Only these; all by default.
        light: Leading directions only: v1, u1, topk, cosine, gap.
        exact_side: Smaller side of a matrix up to which sigma2, gram and effective rank are exact; above it they are
            estimates from leading triplets and fixed random probes, with their errors beside them.
        device: ``cpu`` or ``cuda``.
        cache: Folder of results, by the hash of the matrices; with it a stopped analysis continues.
        progress: Called with (matrices done, of how many, name) as it goes on.
        into: Filled row by row, so that its rows are there if an error ends the analysis.

    Raises:
        UserError: The checkpoint cannot be read, is of an unknown architecture, or has a single layer; in one line.
    """
    settings = Settings(light, exact_side, _device(device))
    table, name = find_model(path, against, revision, own_map, fold_norms, projections)
    analysis = into if into is not None else Analysis("")
    analysis.model, analysis.family, analysis.notes = name, table.family, list(table.notes)
    total = sum(map(len, table.sequences))
    results: list[Result] = []
    for result in walk(table, settings, ResultCache(Path(cache) if cache else None)):
        results.append(result)
        _add(analysis, result, light)
        if progress is not None:
            progress(len(results), total, f"{result.entry.projection} {result.entry.depth}")
    _summarise(analysis, results)
    return analysis


def find_model(
    path: str | Path,
    against: str | Path | None = None,
    revision: str | None = None,
    own_map: str | Path | None = None,
    fold_norms: bool = False,
    projections: Sequence[str] | None = None,
) -> tuple[MatrixTable, str]:
    """Finds the matrices of a checkpoint, or of the difference of two, as :func:`analyze` takes them, and its name.

    Raises:
        UserError: As :func:`analyze`.
    """
    own = Path(own_map) if own_map else None
    checkpoint = open_model(path, revision)
    table, name = find_matrices(checkpoint, own, fold_norms), checkpoint.name
    if against is not None:
        base = open_model(against, revision)
        table, name = differences(table, find_matrices(base, own, fold_norms)), f"{name} - {base.name}"
    if projections:
        known = list(dict.fromkeys(sequence[0].projection for sequence in table.sequences))
        for projection in projections:
            if projection not in known:
                raise UserError(f"--projections: {path} has no {projection!r}, only {' '.join(known)}")
        table.sequences = [s for s in table.sequences if s[0].projection in projections]
    if all(len(sequence) < 2 for sequence in table.sequences):
        raise UserError(f"{path} has a single layer, so no two that are adjacent: there is nothing to compare")
    return table, name


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device: {name} is not there: {str(error).splitlines()[0][:150]}; use cpu") from error
    return device


def _add(analysis: Analysis, result: Result, light: bool) -> None:
    """Adds the rows of one matrix."""
    entry = result.entry
    base: dict[str, Any] = {"model": analysis.model, "projection": entry.projection}
    if entry.expert is not None:
        base["expert"] = entry.expert
    spectrum = {key: value for key, value in result.spectrum.items() if key != "singular_values"}
    numbered = {f"s{i + 1:02d}": value for i, value in enumerate(result.spectrum.get("singular_values", ()))}
    status = "ok" if result.problem is None else f"{result.problem}: {entry.where}"
    m, n = result.shape
    analysis.spectra.append(
        {**base, "layer": entry.depth, "rows": m, "columns": n, "status": status} | spectrum | numbered
    )
    if result.pair is not None:
        lower = analysis.spectra[-2]["status"]
        marked = status if status != "ok" else lower
        row = {**base, "layer": entry.depth - 1} | result.pair
        row |= {"theory": THEORY[entry.matrix.side], "status": marked}
        analysis.rows.append(row)


def _problem_notes(results: Sequence[Result]) -> list[str]:
    """Returns a line for each reason for which matrices have no directions, however many of them there are."""
    notes = []
    for problem in dict.fromkeys(result.problem for result in results if result.problem is not None):
        found = [result.entry for result in results if result.problem == problem]
        if len(found) == 1:
            entry = found[0]
            notes.append(f"{entry.where} is {problem}: {entry.projection} of layer {entry.depth} has no row")
            continue
        layers: dict[str, list[int]] = {}
        for entry in found:
            layers.setdefault(entry.projection, []).append(entry.depth)
        places: dict[str, list[str]] = {}
        for projection, depths in layers.items():
            places.setdefault(_ranges(depths), []).append(projection)
        where = "; ".join(f"{' '.join(names)} of layers {depths}" for depths, names in places.items())
        notes.append(f"{len(found)} of {len(results)} matrices are {problem} and have no rows: {where}")
    return notes


def _ranges(numbers: Sequence[int]) -> str:
    """Returns ``0 to 3, 7`` for 0, 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def _summarise(analysis: Analysis, results: Sequence[Result]) -> None:
    analysis.notes += _problem_notes(results)
    order = list(dict.fromkeys(result.entry.projection for result in results))
    for projection in order:
        ours = [result for result in results if result.entry.projection == projection]
        rows = [row for row in analysis.rows if row["projection"] == projection]
        m, n = ours[0].shape
        summary: dict[str, Any] = {
            "layers": len({result.entry.depth for result in ours}),
            "pairs": len(rows),
            "rows": m,
            "columns": n,
            "theory": THEORY[ours[0].entry.matrix.side],
        }
        for measure in (*LIGHT, *FULL, *(f"{name}_error" for name in FULL)):
            summary[measure] = _mean(row.get(measure) for row in rows)
        spectra = [result.spectrum for result in ours]
        for measure in ("gap", "sigma_max", "stable_rank", "effective_rank"):
            summary[measure] = _mean(spectrum.get(measure) for spectrum in spectra)
        summary["defined"] = _mean(float(row["defined"]) for row in rows)
        for measure in ("v1", "u1"):
            summary[f"{measure}_where_defined"] = _mean(row[measure] for row in rows if row["defined"])
        summary |= {"chance_v1": chance("v1", n), "chance_u1": chance("u1", m)}
        summary |= {"chance_topk_in": chance("topk", n), "chance_topk_out": chance("topk", m)}
        first = [result for result in ours if result.entry.expert in (None, 0)] or ours
        analysis.vectors[projection] = {}
        for measure in ("v1", "u1"):
            vectors = [getattr(result, measure) for result in first]
            if len({len(vector) for vector in vectors}) == 1:
                analysis.vectors[projection][measure] = np.stack(vectors)
                permuted, distant = baselines(analysis.vectors[projection][measure])
                summary |= {f"{measure}_permuted": permuted, f"{measure}_distant": distant}
        analysis.summary[projection] = summary


def baselines(vectors: np.ndarray) -> tuple[float | None, float | None]:
    """Returns what ``v1`` or ``u1`` would be without adjacency.

    Args:
        vectors: Leading vectors of the layers, ``(L, d)``.

    Returns:
        The mean over adjacent pairs after the coordinates of one vector were permuted at random, which keeps the sizes
        of its entries; and the mean over pairs of layers that are not adjacent.
    """
    generator = np.random.default_rng(SEED)
    alive = vectors[np.linalg.norm(vectors, axis=1) > 0.5]
    if len(alive) < 2:
        return None, None
    permuted = [
        float(np.abs((alive[:-1] * alive[1:, generator.permutation(alive.shape[1])]).sum(1)).mean())
        for _ in range(DRAWS)
    ]
    first, second = np.triu_indices(len(vectors), 2)
    if len(first) > DISTANT_PAIRS:
        chosen = generator.choice(len(first), DISTANT_PAIRS, replace=False)
        first, second = first[chosen], second[chosen]
    overlaps = np.abs(vectors @ vectors.T)
    real = np.linalg.norm(vectors, axis=1) > 0.5
    kept = real[first] & real[second]
    distant = float(overlaps[first[kept], second[kept]].mean()) if kept.any() else None
    return statistics.fmean(permuted), distant


def _mean(values: Iterable[float | None]) -> float | None:
    there = [float(value) for value in values if value is not None]
    return statistics.fmean(there) if there else None
