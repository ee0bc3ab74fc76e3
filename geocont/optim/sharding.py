"""An optimizer whose matrices are stepped by one rank each, and whose results are exchanged.

Under data-parallel training all ranks hold the same weights and, once reduced, the same gradients. A step that costs
much can therefore be shared: every matrix has one rank as its owner, which keeps its state, steps it and sends the
result to the others. All ranks then hold the owner's weights, bit for bit, whatever their own arithmetic.

The ranks are those of the default process group of torch.distributed. It is looked for when a step is taken, so an
optimizer may be built before the group. Collectives are called by all ranks in the same order: the one that agrees
on a step (:func:`agree`), then one broadcast for each rank that owns anything (:func:`broadcast_from_owners`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from geocont.errors import UserError
from geocont.manifolds import DGram, Euclidean, Manifold, Stiefel
from geocont.optim.solvers import ASCENT_POLAR_STEPS, ASCENTS, default_iterations


def world() -> tuple[int, int]:
    """Returns this process's rank and the number of ranks; (0, 1) where no process group is initialised."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def plan(costs: Sequence[float], ranks: int, loads: Sequence[float] | None = None) -> list[int]:
    """Returns the owner of each item: largest first, each to the rank that has least to do (Graham's rule).

    The same arguments give the same answer on every rank; the lower rank and the earlier item win ties. No rank gets
    more than 4/3 of the least possible, and ranks may be left without any item.

    Args:
        costs: Of the items; any number of them.
        ranks: At least 1.
        loads: What the ranks have to do already; by default nothing.
    """
    busy = list(loads) if loads is not None else [0.0] * ranks
    owners = [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owners[item] = min(range(ranks), key=lambda rank: (busy[rank], rank))
        busy[owners[item]] += costs[item]
    return owners


def cost(shape: Sequence[int], manifold: Manifold, solver: str, iterations: int | None) -> float:
    """Returns roughly what the step of a matrix costs, to be compared to that of others, in operations of products.

    Measured on one core: an iteration takes as long as products of 43 n^3 operations on DGram, with its conjugate
    gradients, and of 26 n^3 elsewhere. ``dual_ascent`` multiplies tall matrices only.
    """
    m, n = max(shape), min(shape)
    tall, iteration = 2.0 * m * n * n, (43.0 if isinstance(manifold, DGram) else 26.0) * n**3
    if solver == "dual_ascent":
        return 3 * ASCENT_POLAR_STEPS * (1 + (ASCENTS if iterations is None else iterations)) * tall
    if isinstance(manifold, Euclidean):
        return 3 * tall + iteration / 3
    if isinstance(manifold, Stiefel) and m == n:
        return 5 * tall + iteration / 2
    if solver == "projected":
        return 9 * tall + iteration
    return 9 * tall + (1 + (default_iterations(manifold, m == n) if iterations is None else iterations)) * iteration


class Sharded(Optimizer):
    """An optimizer that shares its parameters among ranks; a subclass steps what it ``owns`` and calls ``exchange``.

    State is kept by the owner only. ``consolidate_state_dict`` brings all of it to one rank for ``state_dict``, as
    torch's ZeroRedundancyOptimizer does and as Lightning's strategies expect when they save a checkpoint. The state
    that is loaded is always whole, on every rank; what a rank does not own it drops at its next step, so a checkpoint
    fits any number of ranks.

    Attributes:
        shard: Whether to share at all; otherwise every rank steps everything.
    """

    shard: bool
    _owners: dict[Parameter, int]
    _loads: list[float]  # of each rank, and which of them this is, at the last step
    _rank: int

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], shard: bool) -> None:
        self.shard = shard
        self.forget_owners()
        super().__init__(params, defaults)

    @property
    def sharded(self) -> bool:
        """Whether there are several ranks now, and they share the work."""
        return self.shard and world()[1] > 1

    def owns(self, parameter: Parameter) -> bool:
        """Tells whether this rank steps a parameter that has been assigned."""
        return not self._loads or self._owners[parameter] == self._rank

    def assign_owners(self, parameters: Sequence[Parameter], costs: Sequence[float]) -> None:
        """Gives owners to parameters that have none, and drops the state of those that are not this rank's.

        Parameters may join in later, as frozen ones do; the others keep their owners.

        Raises:
            UserError: The number of ranks is not that of the last step, which left state on ranks that may be gone.
        """
        rank, ranks = world() if self.sharded else (0, 0)
        if ranks != len(self._loads):
            self.check_whole()
            self._owners, self._loads, self._rank = {}, [0.0] * ranks, rank
        if not ranks:
            return
        new = [
            (parameter, cost)
            for parameter, cost in zip(parameters, costs, strict=True)
            if parameter not in self._owners
        ]
        for (parameter, cost), owner in zip(new, plan([cost for _, cost in new], ranks, self._loads), strict=True):
            self._owners[parameter] = owner
            self._loads[owner] += cost
        self.release()

    @torch.no_grad()
    def exchange(self, parameters: Sequence[Parameter]) -> None:
        """Brings parameters that were stepped from their owners to all ranks."""
        if self.sharded:
            broadcast_from_owners(parameters, [self._owners[parameter] for parameter in parameters])

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Brings the state of all parameters to one rank, to the CPU; every rank must call it.

        There ``state_dict`` is whole then; it, or the next step, drops what is not that rank's. Without several ranks
        this does nothing.

        Args:
            to: The rank.
        """
        if not self.sharded:
            return
        parameters = [p for group in self.param_groups for p in group["params"]]
        mine = [(i, p) for i, p in enumerate(parameters) if self._owners.get(p) == self._rank and p in self.state]
        tensors = [((i, key), value) for i, p in mine for key, value in self.state[p].items()]
        for (i, key), value in gather_tensors(tensors, to, parameters[0].device):
            self.state[parameters[i]][key] = value

    def release(self) -> None:
        """Drops the state of parameters that another rank owns."""
        for parameter in self._elsewhere():
            self.state.pop(parameter, None)

    def check_whole(self) -> None:
        """Raises a :class:`UserError` if there is state that is on other ranks only."""
        missing = sum(parameter not in self.state for parameter in self._elsewhere())
        if missing:
            raise UserError(
                f"the optimizer's state of {missing} matrices is on other ranks; call consolidate_state_dict() on all"
                " ranks before state_dict() on rank 0, and before the number of ranks changes"
            )

    def forget_owners(self) -> None:
        """Lets the next step choose owners anew, the state being whole on every rank."""
        self._owners, self._loads, self._rank = {}, [], 0

    def state_dict(self) -> dict[str, Any]:
        """Returns groups and the whole state, which must be here.

        Raises:
            UserError: Some of it is on other ranks; to leave it out would start its momentum from nothing, unseen.
        """
        self.check_whole()
        state = super().state_dict()
        self.release()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores groups and state; any number of ranks may have saved them."""
        super().load_state_dict(state_dict)
        self.forget_owners()

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a copy needs: torch's own keeps groups and state only."""
        kept = ("shard", "_owners", "_loads", "_rank")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in kept}}

    def _elsewhere(self) -> list[Parameter]:
        return [parameter for parameter, owner in self._owners.items() if owner != self._rank]


def agree(sound: Tensor, present: Sequence[bool]) -> tuple[bool, list[int]]:
    """Returns whether all ranks are sound, and which items some ranks have and others lack.

    One all-reduce of two numbers an item: some tenths of a millisecond between processes, and the caller
    waits for the flag anyway. In exchange no rank can step, and wait for the others, while another one skips.

    Args:
        sound: Of no dimension: whether this rank's gradients are finite.
        present: Whether this rank has an item, as the gradient of a parameter.
    """
    has = torch.tensor(present, dtype=torch.int32, device=sound.device)
    flags = torch.cat([sound.to(torch.int32).reshape(1), has, -has])
    dist.all_reduce(flags, op=dist.ReduceOp.MIN)
    everywhere, least, most = flags.cpu().split([1, len(present), len(present)])
    return bool(everywhere), torch.nonzero(least != -most).flatten().tolist()


def broadcast_from_owners(tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
    """Overwrites tensors with what their owners have, one flat buffer for each owner and type.

    A broadcast is waited for before its buffer is let go, and no buffer is larger than one rank's share.
    """
    rank = world()[0]
    for owner, dtype in dict.fromkeys((o, t.dtype) for t, o in zip(tensors, owners, strict=True)):
        shared = [t for t, o in zip(tensors, owners, strict=True) if (o, t.dtype) == (owner, dtype)]
        if rank == owner:
            dist.broadcast(torch.cat([tensor.detach().reshape(-1) for tensor in shared]), owner)
            continue
        flat = shared[0].new_empty(sum(tensor.numel() for tensor in shared))
        dist.broadcast(flat, owner)
        for tensor, values in zip(shared, flat.split([tensor.numel() for tensor in shared]), strict=True):
            tensor.copy_(values.view(tensor.shape))


def gather_tensors(
    tensors: Sequence[tuple[Hashable, Tensor]], to: int, device: torch.device
) -> list[tuple[Any, Tensor]]:
    """Returns the tensors of all other ranks with their keys, on the CPU, on rank ``to``, and nothing elsewhere.

    Every rank must call it. The tensors travel one by one, so that ``device`` never holds more than one more.
    """
    rank, ranks = world()
    listings: list[Any] = [None] * ranks
    dist.all_gather_object(listings, [(key, tuple(tensor.shape), tensor.dtype) for key, tensor in tensors])
    between = torch.device("cpu") if dist.get_backend() == "gloo" else device  # gloo sends from the CPU only
    if rank != to:
        for _, tensor in tensors:
            dist.send(tensor.to(between).contiguous(), to)
        return []
    found = []
    for source in (source for source in range(ranks) if source != to):
        for key, shape, dtype in listings[source]:
            tensor = torch.empty(shape, dtype=dtype, device=between)
            dist.recv(tensor, source)
            found.append((key, tensor.cpu()))
    return found
