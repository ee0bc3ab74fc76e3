"""Manifold Muon: steepest descent in the spectral norm, on a manifold for each matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from geocont.errors import UserError
from geocont.linalg import full_precision
from geocont.manifolds import Euclidean, Manifold, Stiefel, as_manifold
from geocont.optim.sharding import Sharded, agree, cost
from geocont.optim.solvers import SOLVERS, Solution, dual_ascent, projected, reweighted
from geocont.weights import part_of

SolverName = Literal["reweighted", "dual_ascent", "projected"]
ManifoldSpec = str | Mapping[str, Any]

#: Module of matrices whose parameter group names none.
MODULE = "matrices"
#: Entries of the matrices that are solved at once: more saves launches on an accelerator, and costs memory.
BATCH_ENTRIES = 2**24


@dataclass(frozen=True)
class Block:
    """The part of a parameter that is one matrix: rows and columns count after transposing; None means all."""

    manifold: ManifoldSpec
    rows: tuple[int, int] | None = None
    columns: tuple[int, int] | None = None
    transposed: bool = False

    def of(self, tensor: Tensor) -> Tensor:
        """Returns this block, out x in, as a view of a parameter."""
        return part_of(tensor, self.rows, self.columns, self.transposed)


@dataclass(frozen=True)
class MatrixStatistics:
    """What the last step did to one matrix.

    ``certified_ratio``, ``tangent_residual`` and ``objective`` are the solver's, see
    :class:`~geocont.optim.solvers.Solution`; ``update_rms`` is the root mean square of the entries of the step, its
    learning rate included.
    """

    parameter: str
    block: int
    module: str
    manifold: str
    certified_ratio: float
    tangent_residual: float
    objective: float
    update_rms: float


@dataclass
class _Work:
    """One matrix to be stepped: views of the tall side, its place among all matrices, and where its state lies."""

    group: dict[str, Any]
    parameter: Parameter
    place: int
    index: int
    block: Block
    w: Tensor
    g: Tensor


class ManifoldMuon(Sharded):
    """Muon whose matrices stay on manifolds: W <- retract(W - lr A), A the steepest tangent direction of norm one.

    The momentum is b <- momentum b + g and the direction is that of g + momentum b (Nesterov) or b. Matrices are put on
    their manifold when the optimizer is built, and kept in float32. Same-shaped matrices are solved as a batch. With
    ``manifold: euclidean`` it is Muon with an accurate msign.

    A step is skipped, and counted in ``skipped_steps``, where a gradient is NaN or infinite. A parameter without a
    gradient is left alone.

    Where torch.distributed has several ranks, each matrix parameter is stepped by one of them, which alone keeps its
    state, and the weights are exchanged: see :mod:`geocont.optim.sharding`. Gradients must be the same everywhere, as
    DistributedDataParallel leaves them.

    Args:
        params: Matrices, (name, matrix) pairs, or parameter groups that carry any of the options below.
        lr: Spectral norm of the update (before ``adjust_lr_fn``).
        momentum: Share of the momentum that a step keeps, in [0, 1).
        nesterov: Whether the direction looks ahead: g + momentum b.
        weight_decay: W <- (1 - lr weight_decay) W, of unconstrained matrices only; a constraint holds the scale anyway.
        manifold: ``euclidean``, ``stiefel``, ``dgram`` or ``oblique``, or a name with options,
            ``{name: dgram, lo: 0.5, hi: 2.0}``.
        solver: ``reweighted``; ``dual_ascent``, the published one, for comparison; ``projected``, one msign.
        iterations: Of the solver; by default 3 (on DGram 4, and 8 for square matrices), and 20 of
            ``dual_ascent``.
        adjust_lr_fn: Scaling of lr for matrices that are not square, as in torch.optim.Muon: ``original``,
            sqrt(max(1, rows / columns)); ``match_rms_adamw``, 0.2 sqrt(max(rows, columns)); none by default.
        start: How matrices are put on their manifold: at the ``nearest`` point, or ``orthonormal``, a point of all
            manifolds alike, so that they can be compared from one start.
        blocks: The matrices within a fused parameter, :class:`Block` s or their fields; by default it is one matrix.
        shard: Whether several ranks share the matrices; otherwise each of them steps them all.

    Raises:
        UserError: An option has no meaning, or a parameter is no matrix, is empty, is complex, has a constraint and is
            not float32, or has no place on its manifold; the parameter is named.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        manifold: str | dict[str, Any] = "stiefel",
        solver: SolverName = "reweighted",
        iterations: int | None = None,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None,
        start: Literal["nearest", "orthonormal"] = "nearest",
        blocks: Sequence[Block | Mapping[str, Any]] | None = None,
        shard: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "manifold": manifold,
            "solver": solver,
            "iterations": iterations,
            "adjust_lr_fn": adjust_lr_fn,
            "start": start,
            "blocks": blocks,
            "skipped_steps": 0,
        }
        self._last: list[tuple[list[int], Solution, Tensor]] = []
        super().__init__(params, defaults, shard)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds matrices, and puts them on their manifold; a frozen one is left as it is."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["blocks"] is not None:  # plain values, that a checkpoint can hold
            group["blocks"] = [
                dict(vars(block)) if isinstance(block, Block) else dict(block) for block in group["blocks"]
            ]
        _check_options(group)
        for name, parameter in _named(group):
            _check_parameter(name, parameter, group)
            for block in _blocks(group):
                if parameter.requires_grad:
                    _put_on_manifold(name, block.of(parameter.data), as_manifold(block.manifold), group["start"])

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a copy, which torch makes of groups and state only."""
        super().__setstate__(state)
        self.__dict__.setdefault("_last", [])

    @property
    def skipped_steps(self) -> int:
        """Number of steps that were skipped because a gradient was not finite."""
        return max(group["skipped_steps"] for group in self.param_groups)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Performs one step, unless a gradient is not finite."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if gradients_are_finite(self, together=self.sharded):
            self.update()
        else:
            self.skip()
        return loss

    def skip(self) -> None:
        """Counts a step that is not taken."""
        for group in self.param_groups:
            group["skipped_steps"] += 1

    @torch.no_grad()
    @full_precision()
    def update(self) -> None:
        """Performs one step with gradients that are finite, on all ranks."""
        self._last = []
        with_gradient = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.assign_owners([p for p, _ in with_gradient], [_cost(p, group) for p, group in with_gradient])
        for batch in _batches(self._work()):
            self._step_batch(batch)
        self.exchange([p for p, _ in with_gradient])

    def statistics(self) -> list[MatrixStatistics]:
        """Returns what the last step did to each matrix of this rank; nothing before the first. It is known already."""
        labels, found = self._labels(), {}
        for places, solution, rms in self._last:
            columns = (solution.certified_ratio, solution.tangent_residual, solution.objective, rms)
            for place, *values in zip(places, *(column.tolist() for column in columns), strict=True):
                found[place] = MatrixStatistics(*labels[place], *values)
        return [found[place] for place in sorted(found)]

    def gather_statistics(self) -> list[MatrixStatistics]:
        """Returns what the last step did to each matrix, whichever rank stepped it; every rank must call it.

        The order, that of the parameter groups, does not depend on the number of ranks.
        """
        if not self.sharded:
            return self.statistics()
        labels = self._labels()
        table = torch.zeros(len(labels), 5, device=self.param_groups[0]["params"][0].device)
        for places, solution, rms in self._last:
            columns = (solution.certified_ratio, solution.tangent_residual, solution.objective, rms)
            table[places] = torch.stack([torch.ones_like(rms), *columns], dim=-1)
        dist.all_reduce(table)
        rows = zip(labels, table.tolist(), strict=True)
        return [MatrixStatistics(*label, *values) for label, (stepped, *values) in rows if stepped]

    @torch.no_grad()
    def manifold_residuals(self) -> list[tuple[str, int, str, float]]:
        """Returns (parameter, block, module, residual) of each matrix as it is now; see the manifolds' ``residual``.

        The weights are the same on every rank, so each of them can tell, without the others, of all matrices.
        """
        return [
            (name, index, group.get("module", MODULE), float(as_manifold(block.manifold).residual(block.of(parameter))))
            for group in self.param_groups
            for name, parameter in _named(group)
            for index, block in enumerate(_blocks(group))
        ]

    def _labels(self) -> list[tuple[str, int, str, str]]:
        """Returns (parameter, block, module, manifold) of each matrix."""
        return [
            (name, index, group.get("module", MODULE), as_manifold(block.manifold).name)
            for group in self.param_groups
            for name, _ in _named(group)
            for index, block in enumerate(_blocks(group))
        ]

    def _work(self) -> Iterator[_Work]:
        """Updates the momenta and yields every matrix that has a gradient and is this rank's."""
        place = 0
        for group in self.param_groups:
            blocks = _blocks(group)
            for parameter in group["params"]:
                first, place = place, place + len(blocks)
                if parameter.grad is None or not self.owns(parameter):
                    continue
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                momentum = state["momentum_buffer"].mul_(group["momentum"]).add_(parameter.grad)
                direction = momentum
                if group["nesterov"]:
                    direction = torch.add(parameter.grad, momentum, alpha=group["momentum"])
                for index, block in enumerate(blocks):
                    w, g = block.of(parameter), block.of(direction)
                    tall = w.shape[0] >= w.shape[1]
                    yield _Work(group, parameter, first + index, index, block, w if tall else w.mT, g if tall else g.mT)

    def _step_batch(self, batch: list[_Work]) -> None:
        group, manifold = batch[0].group, as_manifold(batch[0].block.manifold)
        w = torch.stack([work.w for work in batch]).float()
        g = torch.stack([work.g for work in batch]).float()
        keys = [(self.state[work.parameter], f"carry_{work.index}") for work in batch]
        start = None
        if any(key in state for state, key in keys):  # a matrix that has none starts from nothing
            start = torch.stack([state.get(key, w.new_zeros(w.shape[-1], w.shape[-1])) for state, key in keys])
        solution = _solve(w, g, manifold, group, start)
        lr = group["lr"] * _shape_factor(group["adjust_lr_fn"], *batch[0].block.of(batch[0].parameter).shape)
        if isinstance(manifold, Euclidean):
            w.mul_(1 - group["lr"] * group["weight_decay"])
        moved = manifold.retr(w, -lr * solution.update)
        for i, (work, (state, key)) in enumerate(zip(batch, keys, strict=True)):
            work.w.copy_(moved[i])
            if solution.carry is not None:
                state[key] = solution.carry[i].clone()
        rms = lr * torch.linalg.matrix_norm(solution.update) / (w.shape[-2] * w.shape[-1]) ** 0.5
        nothing = rms.new_empty(0)  # the tall tensors are not kept
        self._last.append(
            ([work.place for work in batch], replace(solution, update=nothing, dual=None, carry=None), rms)
        )


def gradients_are_finite(optimizer: Optimizer, together: bool = False) -> bool:
    """Tells whether no gradient of an optimizer's parameters has a NaN or an Inf in it (or overflows when squared).

    Args:
        optimizer: The optimizer.
        together: Whether it must hold on all ranks, which call this at the same time.

    Raises:
        UserError: A parameter has a gradient on some ranks only.
    """
    named = [pair for group in optimizer.param_groups for pair in _named(group)]
    gradients = [p.grad for _, p in named if p.grad is not None]
    total = torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros((), device=named[0][1].device)
    if not together:
        return bool(torch.isfinite(total))
    finite, differing = agree(torch.isfinite(total), [p.grad is not None for _, p in named])
    if differing:
        raise UserError(
            f"{named[differing[0]][0]}: some ranks have a gradient of it and others have none; train with"
            " DistributedDataParallel (--trainer.strategy=ddp), or set the optimizer's shard to false"
        )
    return finite


def _solve(w: Tensor, g: Tensor, manifold: Manifold, group: dict[str, Any], start: Tensor | None) -> Solution:
    iterations = {} if group["iterations"] is None else {"iterations": group["iterations"]}
    if group["solver"] == "dual_ascent":
        return dual_ascent(w, g, manifold, **iterations)
    root: Any = "eigh" if w.device.type == "cpu" else "newton_schulz"
    if group["solver"] == "projected":
        return projected(w, g, manifold, root=root)
    return reweighted(w, g, manifold, start=start, root=root, **iterations)


def _batches(work: Iterable[_Work]) -> Iterator[list[_Work]]:
    """Yields matrices of equal shape, constraint and options together, within :data:`BATCH_ENTRIES`."""
    kinds: dict[Any, list[_Work]] = {}
    for each in work:
        options = tuple(each.group[key] for key in ("solver", "iterations", "lr", "weight_decay", "adjust_lr_fn"))
        shape = tuple(each.block.of(each.parameter).shape)
        key = (shape, repr(each.block.manifold), options, each.w.device, each.w.dtype)
        kinds.setdefault(key, []).append(each)
    for same in kinds.values():
        count = max(1, BATCH_ENTRIES // same[0].w.numel())
        for first in range(0, len(same), count):
            yield same[first : first + count]


def _cost(parameter: Parameter, group: dict[str, Any]) -> float:
    """Returns what a step of a parameter costs, compared to others."""
    return sum(
        cost(block.of(parameter).shape, as_manifold(block.manifold), group["solver"], group["iterations"])
        for block in _blocks(group)
    )


def _shape_factor(adjust_lr_fn: str | None, rows: int, columns: int) -> float:
    if adjust_lr_fn is None:
        return 1.0
    if adjust_lr_fn == "original":
        return max(1.0, rows / columns) ** 0.5
    return 0.2 * max(rows, columns) ** 0.5


def _named(group: dict[str, Any]) -> Iterator[tuple[str, Parameter]]:
    names = group.get("param_names") or [f"parameter {i}" for i in range(len(group["params"]))]
    return zip(names, group["params"], strict=True)


def _blocks(group: dict[str, Any]) -> list[Block]:
    if group["blocks"] is None:
        return [Block(group["manifold"])]
    return [Block(**block) for block in group["blocks"]]


def _put_on_manifold(name: str, w: Tensor, manifold: Manifold, start: str) -> None:
    if manifold.check_point_on_manifold(w)[0]:  # as those of a run that is resumed, which keep their column norms
        return
    if start == "orthonormal" and not isinstance(manifold, Euclidean):
        _put_on_manifold(name, w, Stiefel(), "nearest")
    if not bool(torch.isfinite(w).all()):
        raise UserError(f"{name}: it has a NaN or an infinite entry, and no place on its manifold")
    try:
        w.copy_(manifold.projx(w))
    except UserError as error:
        raise UserError(f"{name}: {error}") from error


def _check_options(group: dict[str, Any]) -> None:
    ranges = {
        "lr": (group["lr"] >= 0, "at least 0"),
        "momentum": (0 <= group["momentum"] < 1, "in [0, 1)"),
        "weight_decay": (group["weight_decay"] >= 0, "at least 0"),
        "iterations": (group["iterations"] is None or group["iterations"] >= 0, "at least 0"),
        "solver": (group["solver"] in SOLVERS, f"one of {', '.join(SOLVERS)}"),
        "start": (group["start"] in ("nearest", "orthonormal"), "nearest or orthonormal"),
        "adjust_lr_fn": (
            group["adjust_lr_fn"] in (None, "original", "match_rms_adamw"),
            "original, match_rms_adamw or none",
        ),
    }
    for key, (valid, what) in ranges.items():
        if not valid:
            raise UserError(f"optimizer.{key} must be {what}, got {group[key]!r}")
    for block in _blocks(group):
        as_manifold(block.manifold)


def _check_parameter(name: str, parameter: Parameter, group: dict[str, Any]) -> None:
    shape = tuple(parameter.shape)
    if parameter.ndim != 2 or parameter.numel() == 0:
        raise UserError(f"{name}: ManifoldMuon steps matrices, this has shape {shape}; give it to another optimizer")
    if not parameter.is_floating_point():
        raise UserError(f"{name}: ManifoldMuon steps real matrices, this is {parameter.dtype}")
    constrained = [block for block in _blocks(group) if not isinstance(as_manifold(block.manifold), Euclidean)]
    if constrained and parameter.dtype != torch.float32:
        raise UserError(
            f"{name}: a constrained matrix must be float32, this is {parameter.dtype}, which drifts off its manifold;"
            " train with --trainer.precision=bf16-mixed, or leave it unconstrained"
        )
    for block in _blocks(group):
        sizes = shape[::-1] if block.transposed else shape
        parts = zip((block.rows, block.columns), sizes, strict=True)
        if not all(part is None or 0 <= part[0] < part[1] <= size for part, size in parts):
            raise UserError(
                f"{name}: rows {block.rows} and columns {block.columns} do not lie within its shape {shape}"
            )
