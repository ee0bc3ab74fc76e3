"""Shards: which rank measures what, and how the ranks come to know each other's values.

A collective hangs all ranks if one of them misses it. So there is one exchange for each firing, outside of whatever may
fail, and what failed on a rank travels with it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from geocont.weights import Matrix, WeightMap

T = TypeVar("T")
Unit = TypeVar("Unit", bound=Hashable)


class ExchangeError(RuntimeError):
    """The ranks could not exchange their values: one of them is gone. Unlike a failed measurement it ends the run."""


@dataclass(frozen=True)
class Shards:
    """This rank among all of them; with one rank nothing distributed is ever called.

    Attributes:
        rank: Number of this rank.
        ranks: How many there are.
    """

    rank: int = 0
    ranks: int = 1

    @classmethod
    def current(cls) -> Shards:
        """Returns the ranks of the process group that there is, one rank where there is none."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        return cls(dist.get_rank(), dist.get_world_size())

    def gather(self, value: T) -> list[T]:
        """Returns the values of all ranks, in order of rank, on every rank; every rank must call this.

        Args:
            value: What can be pickled; its tensors should lie on the CPU.

        Raises:
            ExchangeError: A rank is gone.
        """
        if self.ranks == 1:
            return [value]
        found: list[Any] = [None] * self.ranks
        try:
            dist.all_gather_object(found, value)
        except Exception as error:
            raise ExchangeError(f"rank {self.rank} lost the other ranks: {error}") from error
        return found

    def bring(self, tensors: Mapping[str, Tensor], owners: Mapping[str, int]) -> dict[str, Tensor]:
        """Returns all tensors on rank 0, and this rank's own elsewhere; every rank must call this.

        They travel one at a time, so that no rank needs room for more than it keeps and one on top.

        Args:
            tensors: Those that this rank holds.
            owners: Name -> rank, of all tensors, the same on every rank.

        Raises:
            ExchangeError: A rank is gone.
        """
        if self.ranks == 1:
            return dict(tensors)
        whole: dict[str, Tensor] = {}
        try:
            for name, owner in owners.items():
                if owner == self.rank and name in tensors:
                    whole[name] = tensors[name].cpu()
                if owner == self.rank != 0:
                    dist.send_object_list([whole.get(name)], dst=0)
                elif self.rank == 0 != owner:
                    box: list[Any] = [None]
                    dist.recv_object_list(box, src=owner)
                    whole |= {} if box[0] is None else {name: box[0]}
        except Exception as error:
            raise ExchangeError(f"rank {self.rank} lost the other ranks: {error}") from error
        return whole


def deal(costs: Mapping[Unit, float], ranks: int) -> dict[Unit, int]:
    """Returns the rank of each piece of work, the dearest first, each to the rank that has least to do so far.

    The same on every rank for the same costs. The busiest rank has at most 4/3 of the least that is possible.
    """
    load, owners = [0.0] * ranks, {}
    for unit in sorted(costs, key=lambda unit: -costs[unit]):
        owners[unit] = load.index(min(load))
        load[owners[unit]] += costs[unit]
    return owners


def sharing_parameters(weights: WeightMap) -> dict[str, str]:
    """Returns projection -> the first projection that it shares a parameter with (itself as a rule).

    q, k and v in one fused parameter belong to one rank, where that rank keeps something for each parameter.
    """
    first: dict[str, str] = {}  # parameter -> projection
    groups = {projection: projection for projection in weights.projections}
    for projection, layers in weights.projections.items():
        for matrix in layers:
            old, new = groups[projection], groups[first.setdefault(matrix.parameter, projection)]
            groups = {each: new if group == old else group for each, group in groups.items()}
    return groups


def cost(layers: list[Matrix], parameters: Mapping[str, Tensor]) -> float:
    """Returns about how dear the measures of these matrices are: m n min(m, n) each, as of a product with itself."""
    shapes = [matrix.of(parameters[matrix.parameter]).shape for matrix in layers]
    return float(sum(m * n * min(m, n) for m, n in shapes))


def on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors as they can travel."""
    return {name: tensor.detach().to("cpu", torch.float32) for name, tensor in tensors.items()}
