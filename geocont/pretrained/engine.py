"""Walking through a checkpoint: two matrices in memory, the next one hashed meanwhile, results kept as they come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from geocont.linalg import full_precision
from geocont.pretrained.cache import ResultCache, digest, key_of
from geocont.pretrained.checkpoint import Piece
from geocont.pretrained.difference import Entry
from geocont.pretrained.layers import EXACT_SIDE, Layer, analyse_matrix, compare
from geocont.pretrained.matrices import MatrixTable

#: What a kept result must have.
VALUES, ARRAYS = {"shape", "problem", "spectrum", "pair"}, {"v1", "u1"}


@dataclass(frozen=True)
class Settings:
    """How matrices are analysed.

    Attributes:
        light: Leading directions only: no sigma2, gram, effective rank.
        exact_side: Smaller side up to which all singular triplets are computed; above it estimates with error bars.
        device: Where matrices are worked on.
    """

    light: bool = False
    exact_side: int = EXACT_SIDE
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def key(self) -> str:
        """Returns what results depend on, for the cache."""
        return f"light={self.light} exact_side={self.exact_side}"


@dataclass
class Result:
    """What was found of one matrix, and of it and the layer below.

    Attributes:
        entry: The matrix.
        shape: ``(out, in)``.
        problem: Why it has no directions, None where it has.
        spectrum: Its spectral measures.
        pair: Measures of the layer below and this one, None where there is none below.
        v1: First right singular vector, ``(in,)``; zero where there is none.
        u1: First left one, ``(out,)``.
    """

    entry: Entry
    shape: tuple[int, int]
    problem: str | None
    spectrum: dict[str, Any]
    pair: dict[str, Any] | None
    v1: np.ndarray
    u1: np.ndarray


class _Loaded:
    """A matrix whose bytes have been hashed; it becomes numbers, and directions, when someone asks."""

    def __init__(self, entry: Entry, pieces: list[Piece], hashed: str) -> None:
        self.entry, self.hash = entry, hashed
        self._pieces: Sequence[Piece] = pieces
        self._layer: Layer | None = None
        self.shape = (0, 0)

    def layer(self, settings: Settings, start: Tensor | None) -> Layer:
        """Returns the matrix with its directions; the mapped bytes are let go."""
        if self._layer is None:
            w = self.entry.numbers(self._pieces, settings.device)
            self._pieces = ()
            self.shape = (w.shape[0], w.shape[1])
            reads = self.entry.matrix.side == "reads"
            self._layer = analyse_matrix(w, reads, settings.light, start, settings.exact_side)
        return self._layer

    def start(self) -> Tensor | None:
        """Returns where a neighbour's iteration may start."""
        return self._layer.start if self._layer is not None else None


def walk(table: MatrixTable, settings: Settings, cache: ResultCache) -> Iterator[Result]:
    """Yields the result of every matrix, projection after projection, layer after layer.

    Raises:
        UserError: A matrix cannot be read, or a result cannot be kept.
    """
    entries: list[tuple[Entry, bool]] = []  # and whether the one before is the layer below
    for sequence in table.sequences:
        for i, entry in enumerate(sequence):
            entries.append((entry, i > 0 and sequence[i - 1].depth == entry.depth - 1))
    with ThreadPoolExecutor(1, thread_name_prefix="geocont-read") as pool:
        # One ahead: reading and hashing overlap computing, and no more than one more matrix is mapped.
        ahead: Future[_Loaded] | None = pool.submit(_load, entries[0][0]) if entries else None
        below: _Loaded | None = None
        for i, (entry, follows) in enumerate(entries):
            assert ahead is not None
            current = ahead.result()
            ahead = pool.submit(_load, entries[i + 1][0]) if i + 1 < len(entries) else None
            yield _result(entry, current, below if follows else None, settings, cache)
            below = current


def _load(entry: Entry) -> _Loaded:
    pieces = entry.pieces()
    return _Loaded(entry, pieces, digest(entry.describe(), pieces))


def _result(entry: Entry, current: _Loaded, below: _Loaded | None, settings: Settings, cache: ResultCache) -> Result:
    key = key_of(current.hash, below.hash if below else "", settings.key())
    known = cache.get(key)
    if known is not None and known[0].keys() >= VALUES and known[1].keys() >= ARRAYS:
        values, arrays = known
    else:
        values, arrays = _compute(current, below, settings)
        cache.put(key, values, arrays)
    shape = (values["shape"][0], values["shape"][1])
    spectrum, pair = values["spectrum"], values["pair"]
    return Result(entry, shape, values["problem"], spectrum, pair, arrays["v1"], arrays["u1"])


@full_precision()
def _compute(
    current: _Loaded, below: _Loaded | None, settings: Settings
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    lower = below.layer(settings, None) if below else None
    layer = current.layer(settings, below.start() if below else None)
    pair = compare(lower, layer, settings.light) if lower is not None else None
    values = {"shape": current.shape, "problem": layer.problem, "spectrum": layer.spectrum, "pair": pair}
    m, n = current.shape
    if layer.w is None:
        return values, {"v1": np.zeros(n, np.float32), "u1": np.zeros(m, np.float32)}
    return values, {"v1": _copied(layer.v[:, 0]), "u1": _copied(layer.u[:, 0])}


def _copied(vector: Tensor) -> np.ndarray:
    """A copy: a view would keep the whole matrix of vectors alive."""
    return np.array(vector.float().cpu().numpy())
