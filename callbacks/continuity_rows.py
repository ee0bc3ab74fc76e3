"""Measuring one family of matrices (weights, gradients ...) projection by projection: what both callbacks share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from callbacks.shards import on_cpu
from geocont.measures.continuity import full_table, light_table, stacks_of_one_shape, summarise
from geocont.weights import WeightMap


@dataclass(frozen=True)
class Share:
    """What one rank has measured of a family, as it travels to the others."""

    metrics: dict[str, float]
    arrays: dict[str, Tensor]
    skipped: int


class ContinuityRows:
    """Continuity of one family of matrices through depth, with warm starts from one firing to the next.

    Args:
        family: First part of the keys: ``weight``, ``gradient``, ``cumulative`` or ``update``.
        warm: Whether leading subspaces start from those of the last firing. The gradients of two batches have less in
            common than that is worth.
        vectors: How many leading vectors of each side are kept at full firings, beside the first (see ``arrays``).

    Attributes:
        metrics: Key -> mean over pairs, of the current firing.
        arrays: Key -> values of each pair (NaN where there is none) and leading vectors, of the current firing:
            ``v1_vector`` ``(L, n)``, and with ``vectors`` above one ``v_vectors`` ``(L, n, vectors)``; ``u`` likewise.
        skipped: Number of values that do not exist in the current firing.
    """

    def __init__(self, family: str, warm: bool = True, vectors: int = 1) -> None:
        self.family, self.warm, self.vectors = family, warm, vectors
        self.starts: dict[str, Tensor] = {}  # projection and run of layers -> block that warms the next solve
        self.begin()

    def begin(self) -> None:
        """Begins a firing: forgets the values of the last one."""
        self.metrics: dict[str, float] = {}
        self.arrays: dict[str, Tensor] = {}
        self.skipped = 0

    def measure(self, projection: str, matrices: Sequence[Tensor], full: bool, keep_start: bool = True) -> None:
        """Measures the matrices of one projection and adds the values to ``metrics`` and ``arrays``.

        Args:
            projection: Last part of the keys.
            matrices: ``(m, n)`` each, in order of depth. Only neighbours of one shape form a pair.
            full: Whether to compute ``sigma2`` and ``gram`` and to keep the leading vectors as well.
            keep_start: Whether the next firing starts from this one's subspaces. False for a firing that a resumed run
                will not see, so that its numbers stay the same.
        """
        runs = stacks_of_one_shape(matrices)
        values: dict[str, list[Tensor]] = {}
        for number, stack in enumerate(runs):
            key = f"{projection}/{number}"
            table = light_table(stack, self.starts.get(key))
            if self.warm and keep_start:
                self.starts[key] = table.subspace.start
            measured = table.values | (full_table(stack, table.subspace) if full and len(stack) > 1 else {})
            for name, value in measured.items():
                values.setdefault(name, []).append(value)
            if full and len(runs) == 1:
                self._keep(projection, "v1_vector", table.subspace.v[..., 0])
                self._keep(projection, "u1_vector", table.subspace.u[..., 0])
                self._keep(projection, "singular_values", table.subspace.s)
                if self.vectors > 1:
                    self._keep(projection, "v_vectors", table.subspace.v[..., : self.vectors])
                    self._keep(projection, "u_vectors", table.subspace.u[..., : self.vectors])
        self.add(projection, {name: torch.cat(parts) for name, parts in values.items()})

    def add(self, projection: str, values: Mapping[str, Tensor]) -> None:
        """Adds measures of one projection: their means as metrics, their values as arrays."""
        means, skipped = summarise(values)
        self.metrics |= {f"{self.family}/{name}/{projection}": value for name, value in means.items()}
        self.skipped += skipped
        for name, value in values.items():
            self._keep(projection, name, value)

    def headline(self, weights: WeightMap) -> float | None:
        """Returns the one number for a progress bar: the mean over projections of continuity on the side that theory
        expects, ``u1`` where a projection writes to the residual stream and ``v1`` where it reads."""
        sides = {projection: layers[0].side for projection, layers in weights.projections.items()}
        keys = [f"{self.family}/{'u1' if side == 'writes' else 'v1'}/{name}" for name, side in sides.items()]
        found = [self.metrics[key] for key in keys if key in self.metrics]
        return sum(found) / len(found) if found else None

    def _keep(self, projection: str, name: str, value: Tensor) -> None:
        self.arrays[f"{self.family}/{name}/{projection}"] = value

    def share(self) -> Share:
        """Returns what this rank has measured in this firing."""
        return Share(self.metrics, on_cpu(self.arrays), self.skipped)

    def merge(self, shares: Sequence[Share]) -> None:
        """Takes what all ranks have measured in this firing in the place of this rank's values."""
        self.begin()
        for share in shares:
            self.metrics |= share.metrics
            self.arrays |= share.arrays
            self.skipped += share.skipped

    def keep_starts(self, owned: Callable[[str], bool], device: torch.device) -> None:
        """Keeps the warm starts of the projections that this rank measures, where they are measured."""
        mine = {key: start for key, start in self.starts.items() if owned(key.rpartition("/")[0])}
        self.starts = {key: start.to(device) for key, start in mine.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the warm starts, so that a resumed run measures the very numbers of an uninterrupted one."""
        return dict(self.starts)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes the warm starts of a checkpoint."""
        self.starts = dict(state)
