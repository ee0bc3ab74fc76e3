"""What continuity is worth: bases that adjacent layers could share, and layers that add the least of their own.

For a run of g adjacent layers and one projection, a shared basis B ``(d, r)`` of the input side replaces each W by
(W B) B^T, of the output side by B (B^T W). The best one holds the leading eigenvectors of the sum of W^T W (W W^T),
each W divided by its norm so that large layers do not decide alone. The error is the share of squared norm that is
lost, so 0.1 is a relative Frobenius norm of 0.32. The definitions are this project's own.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from geocont.linalg import full_precision
from geocont.linalg.polar import eigh
from geocont.pretrained.analysis import Analysis
from geocont.pretrained.engine import Entry
from geocont.pretrained.matrices import MatrixTable

#: Layers that share a basis.
RUN = 4
#: Errors at which the saving is reported.
ERRORS = (0.01, 0.05, 0.1)
#: Size of a side up to which the errors of all ranks are exact; above it, ranks up to ``LARGEST_RANK`` by sketching.
EXACT_SIZE, LARGEST_RANK, OVERSAMPLING = 2048, 256, 16
#: The rank at which the three bases are compared, as a share of the side.
COMPARED_SHARE = 1 / 8
SEED = 20260504

LIMITS = (
    "What this does not tell: errors are of weights, not of outputs, and no task was run; a layer or a basis that looks"
    " redundant here may still matter. Try it and measure."
)


@dataclass
class Advice:
    """What the advisor found.

    Attributes:
        bases: A row for each projection and run of layers: rank, errors of the three bases at that rank, and the share
            of parameters saved at each of ``ERRORS`` on the theory's side (None where it is not reached).
        layers: Layers from the most to the least redundant, with their score.
    """

    bases: list[dict[str, Any]] = field(default_factory=list)
    layers: list[dict[str, Any]] = field(default_factory=list)


def advise(
    table: MatrixTable,
    analysis: Analysis,
    device: torch.device,
    run: int = RUN,
    progress: Callable[[int, int, str], None] | None = None,
) -> Advice:
    """Computes shared bases for every projection and run of layers, one matrix in memory at a time.

    Args:
        table: The matrices of the checkpoint.
        analysis: Of the same checkpoint; it ranks the layers.
        device: Where to compute.
        run: Number of adjacent layers that share a basis.
        progress: Called with (runs done, of how many, name).
    """
    windows = [
        sequence[i : i + run]
        for sequence in table.sequences
        for i in range(0, len(sequence), run)
        if len(sequence[i : i + run]) > 1
    ]
    advice = Advice(layers=rank_layers(analysis))
    for done, window in enumerate(windows):
        row = _window(window, device)
        if row is not None:
            advice.bases.append({"model": analysis.model} | row)
        if progress is not None:
            progress(done + 1, len(windows), f"shared bases {window[0].projection} {window[0].depth}")
    return advice


@full_precision()
def _window(window: Sequence[Entry], device: torch.device) -> dict[str, Any] | None:
    theory = "out" if window[0].matrix.side == "writes" else "in"
    right = _curve(window, theory, device)
    wrong = _curve(window, "out" if theory == "in" else "in", device)
    if right is None or wrong is None:
        return None
    size = right.size
    rank = max(1, min(round(size * COMPARED_SHARE), len(right.errors) - 1, len(wrong.errors) - 1))
    row: dict[str, Any] = {"projection": window[0].projection}
    if window[0].expert is not None:
        row["expert"] = window[0].expert
    row |= {"first_layer": window[0].depth, "last_layer": window[-1].depth, "side": theory, "rank": rank}
    row |= {"error": right.errors[rank], "error_wrong_side": wrong.errors[rank], "error_random": 1 - rank / size}
    row["error_random_wrong_side"] = 1 - rank / wrong.size
    for error in ERRORS:
        row[f"saved_at_{error:g}"] = saved(right, error, len(window))
        row[f"saved_at_{error:g}_wrong_side"] = saved(wrong, error, len(window))
    return row


@dataclass(frozen=True)
class ErrorCurve:
    """Errors of the best shared basis at ranks 0, 1, .. as far as they are known.

    Attributes:
        errors: Share of squared norm lost.
        size: Dimension of the side.
        other: Dimension of the other side.
    """

    errors: list[float]
    size: int
    other: int


def saved(curve: ErrorCurve, error: float, layers: int) -> float | None:
    """Returns the share of parameters that a shared basis saves at an error; below 0 it costs, None if not reached.

    A basis of rank r needs ``size * r`` numbers once and ``other * r`` for each layer, in place of ``size * other``.
    """
    rank = next((r for r, e in enumerate(curve.errors) if e <= error), None)
    if rank is None:
        return None
    return 1 - rank * (curve.size + layers * curve.other) / (layers * curve.size * curve.other)


def _curve(window: Sequence[Entry], side: str, device: torch.device) -> ErrorCurve | None:
    """Errors of the best basis of one side for all matrices of a run; None where one has none."""
    first = _oriented(window[0], side, device)
    size, other = first.shape[1], first.shape[0]
    if size <= EXACT_SIZE:
        gram = torch.zeros(size, size, device=device)
        for entry in window:
            w = _normalised(_oriented(entry, side, device))
            if w is None or w.shape[1] != size:
                return None
            gram += w.mT @ w
        values = eigh(gram)[0].flip(0).clamp(min=0).double() / len(window)
    else:
        found = _sketched(window, side, size, device)
        if found is None:
            return None
        values = found
    lost = (1 - values.cumsum(0)).clamp(min=0)
    return ErrorCurve([1.0, *lost.tolist()], size, other)


def _sketched(window: Sequence[Entry], side: str, size: int, device: torch.device) -> Tensor | None:
    """Leading eigenvalues of the mean Gram matrix, by a random range with one power iteration; never the matrix."""
    generator = torch.Generator().manual_seed(SEED)
    basis = torch.randn(size, LARGEST_RANK + OVERSAMPLING, generator=generator).to(device)
    image = basis
    for _ in range(3):  # two passes turn the basis towards the leading directions, the last one measures
        basis = torch.linalg.qr(image)[0]
        image = torch.zeros_like(basis)
        for entry in window:
            w = _normalised(_oriented(entry, side, device))
            if w is None or w.shape[1] != size:
                return None
            image += w.mT @ (w @ basis)
    projected = basis.mT @ image
    values = torch.linalg.eigvalsh((projected + projected.mT) / 2).flip(0)[:LARGEST_RANK]
    return values.clamp(min=0).double() / len(window)


def _oriented(entry: Entry, side: str, device: torch.device) -> Tensor:
    """The matrix with the wanted side as its columns, float32."""
    w = entry.numbers(entry.pieces(), device).float()
    return w if side == "in" else w.mT


def _normalised(w: Tensor) -> Tensor | None:
    size = w.abs().max()
    if not bool(size.isfinite()) or not bool(size > 0):
        return None
    w = w / size
    return w / torch.linalg.vector_norm(w)


def rank_layers(analysis: Analysis) -> list[dict[str, Any]]:
    """Ranks layers by how much the theory's side of their matrices is that of their neighbours.

    The score of a layer is the mean, over projections and its pairs, of ``topk`` on the side that theory predicts.
    """
    scores: dict[int, list[float]] = {}
    for row in analysis.rows:
        sides = ("topk_in", "topk_out") if row["theory"] == "v1 u1" else None
        keys = sides or (("topk_in",) if row["theory"] == "v1" else ("topk_out",))
        values = [row[key] for key in keys if row.get(key) is not None]
        for layer in (row["layer"], row["layer"] + 1):
            scores.setdefault(layer, []).extend(values)
    ranked = sorted(((statistics.fmean(v), layer) for layer, v in scores.items() if v), key=lambda pair: -pair[0])
    return [
        {"model": analysis.model, "rank": i + 1, "layer": layer, "score": score}
        for i, (score, layer) in enumerate(ranked)
    ]


def summarise_advice(advice: Advice) -> list[dict[str, Any]]:
    """Returns a row for each projection: means over its runs of layers, without those that have no value."""
    table = []
    for projection in dict.fromkeys(row["projection"] for row in advice.bases):
        rows = [row for row in advice.bases if row["projection"] == projection]
        line: dict[str, Any] = {"projection": projection, "side": rows[0]["side"], "rank": rows[0]["rank"]}
        for key in rows[0]:
            if key.startswith(("error", "saved")):
                values = [row[key] for row in rows if row[key] is not None]
                line[key] = statistics.fmean(values) if values else None
        table.append(line)
    return table
