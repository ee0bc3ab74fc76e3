"""Which constraint each module's matrices live on: the assignments of arXiv 2606.13276, or any map in YAML."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch.nn import Parameter

from geocont.errors import UserError
from geocont.manifolds import MANIFOLDS, as_manifold
from geocont.optim.composite import Composite, NamedParameters
from geocont.optim.manifold_muon import Block, ManifoldMuon, ManifoldSpec, SolverName, gradients_are_finite
from geocont.weights import Matrix, WeightMap, canonical_name

#: What a matrix is assigned to that Muon leaves to AdamW.
ADAMW = "adamw"

#: Name -> constraint of attention and of MLP matrices.
ASSIGNMENTS: dict[str, dict[str, str]] = {
    "unconstrained": {"attention": "euclidean", "mlp": "euclidean"},
    "stiefel": {"attention": "stiefel", "mlp": "stiefel"},
    "dgram": {"attention": "dgram", "mlp": "dgram"},
    "hetero": {"attention": "stiefel", "mlp": "dgram"},
    "hetero_inv": {"attention": "dgram", "mlp": "stiefel"},
    "adamw": {"attention": ADAMW, "mlp": ADAMW},
}


@dataclass
class MuonOptions:
    """Options of Manifold Muon; see :class:`~geocont.optim.ManifoldMuon`. The defaults are the paper's.

    Attributes:
        lr: Spectral norm of an update.
        momentum: Share of the momentum that a step keeps.
        nesterov: Whether the direction looks ahead.
        weight_decay: Of unconstrained matrices only.
        solver: ``reweighted``; ``dual_ascent``, the published one; ``projected``, one msign.
        iterations: Of the solver; its own default where none is given.
        adjust_lr_fn: Scaling of lr for matrices that are not square, as in torch.optim.Muon; none by default.
        shard: Whether several ranks share the matrices; otherwise each of them steps them all.
    """

    lr: float = 0.02
    momentum: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.1
    solver: SolverName = "reweighted"
    iterations: int | None = None
    adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None
    start: Literal["nearest", "orthonormal"] = "nearest"
    shard: bool = True


@dataclass
class AdamWOptions:
    """Options of AdamW for everything that is not Muon's. The defaults are the paper's.

    Attributes:
        lr: Learning rate.
        betas: Decay of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Of embeddings, heads and matrices; norms and biases have none.
    """

    lr: float = 6e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1


class ModuleWise(Composite):
    """Manifold Muon for the matrices, each on the constraint of its module, and AdamW for everything else.

    Only matrices of the weight map can be Muon's: never embeddings, tied heads, norms or biases. A step with a NaN or
    infinite gradient anywhere is skipped as a whole, and counted.

    Args:
        params: (name, parameter) pairs; a :class:`~geocont.optim.NamedParameters` brings the model's weight map.
        assignment: ``unconstrained``, ``stiefel``, ``dgram``, ``hetero`` (attention Stiefel, MLP DGram), ``hetero_inv``
            or ``adamw``; or a map to constraints (``stiefel``, ``{name: dgram, lo: 0.5, hi: 2}``, ``adamw`` ...) from
            modules (``attention``, ``mlp``), projections (``q``, ``down`` ...), or regular expressions for
            ``projection/layer_00`` or the parameter's name. A matrix must be covered exactly once.
        fused: Whether matrices that share one parameter, as q, k and v of GPT-2, are constrained each (``split``) or
            together (``whole``, as in the paper).
        muon: Options of Manifold Muon.
        adamw: Options of AdamW.
        weights: Projection -> pattern of parameter names, for modules that have no weight map of their own.

    Raises:
        UserError: A matrix is covered by no constraint or by two, a constraint does not exist, or a key of the map
            covers nothing; in one line that names it.
    """

    def __init__(
        self,
        params: Iterable[tuple[str, Parameter]],
        assignment: str | dict[str, Any] = "hetero",
        fused: Literal["split", "whole"] = "split",
        muon: MuonOptions = MuonOptions(),  # noqa: B008  (never changed)
        adamw: AdamWOptions = AdamWOptions(),  # noqa: B008
        weights: dict[str, Any] | None = None,
    ) -> None:
        given = params.weights if isinstance(params, NamedParameters) else None
        named = NamedParameters([(canonical_name(name), p) for name, p in params], given)
        if weights is not None:
            named.weights = WeightMap.from_patterns(weights, {name: p.shape for name, p in named})
        if named.weights is None:
            raise UserError(
                "optimizer.weights: the model has no weight map; give the patterns of its matrices, as"
                r" {q: 'layers\.(\d+)\.q\.weight', ...}"
            )
        if fused not in ("split", "whole"):
            raise UserError(f"optimizer.fused must be split or whole, got {fused!r}")
        self.plan = plan(named, assignment, fused == "split")
        groups, rest = _groups(named, self.plan)
        parts: dict[str, torch.optim.Optimizer] = {}
        if groups:
            parts["muon"] = ManifoldMuon(groups, **asdict(muon))
        if rest:
            parts["adamw"] = torch.optim.AdamW(_decayed(rest, adamw), **asdict(adamw))
        self._combine(parts)

    def step_parts(self) -> None:
        """Performs the step, unless a gradient is not finite."""
        sharded = any(part.sharded for part in self._sharded_parts())
        if gradients_are_finite(self, together=sharded):
            for part in self.parts.values():
                part.update() if isinstance(part, ManifoldMuon) else part.step()
        else:
            for group in self.param_groups:
                group["skipped_steps"] = self.skipped_steps + 1

    @property
    def skipped_steps(self) -> int:
        """Number of steps that were skipped because a gradient was not finite."""
        return self.param_groups[-1].get("skipped_steps", 0)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores groups and state, which must have been saved under the same assignment.

        Raises:
            UserError: The state was saved under another one, which the groups would bring with them.
        """
        saved, present = _constraints(state_dict["param_groups"]), _constraints(self.param_groups)
        if saved != present:
            raise UserError(f"optimizer.assignment: the checkpoint was saved under {saved}, this is {present}")
        super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a copy needs."""
        return {**super().__getstate__(), "plan": self.plan}

    def describe(self) -> str:
        """Returns a table of what is assigned to what: rule, constraint, matrices and parameters, a line each."""
        kinds: dict[tuple[str, str], list[int]] = {}
        for group in self.param_groups:
            size, count = sum(p.numel() for p in group["params"]), len(group["params"])
            constraint = f"weight decay {group['weight_decay']:g}"
            if group["name"] == "muon":
                specs = [block["manifold"] for block in group["blocks"] or [group]]
                constraint = f"{group['module']}: " + " + ".join(dict.fromkeys(repr(as_manifold(x)) for x in specs))
                count *= len(specs)
            totals = kinds.setdefault((group["name"], constraint), [0, 0])
            totals[:] = totals[0] + count, totals[1] + size
        lines = [("rule", "constraint", "tensors", "parameters")]
        lines += [(*kind, str(count), f"{size:,}") for kind, (count, size) in kinds.items()]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            f"{line[0]:{widths[0]}}  {line[1]:{widths[1]}}  {line[2]:>{widths[2]}}  {line[3]:>{widths[3]}}"
            for line in lines
        )


def _constraints(groups: Iterable[Mapping[str, Any]]) -> str:
    """Returns the rule, or the constraint of each matrix, of every group."""
    found = []
    for group in groups:
        blocks = group.get("blocks") or [group]
        specs = [repr(as_manifold(block["manifold"])) for block in blocks if "manifold" in block]
        found.append(f"{group['module']}: {' + '.join(specs)}" if specs else str(group.get("name")))
    return ", ".join(found)


@dataclass
class Assigned:
    """What one parameter is assigned to.

    Attributes:
        module: ``attention`` or ``mlp``.
        blocks: Its matrices, each with its manifold; none where it is AdamW's.
    """

    module: str
    blocks: list[Block] = field(default_factory=list)


def plan(params: NamedParameters, assignment: str | Mapping[str, Any], split: bool) -> dict[str, Assigned]:
    """Returns what each parameter of the weight map is assigned to; see :class:`ModuleWise`."""
    weights = params.weights
    assert weights is not None
    sizes = {name: p.shape for name, p in params}
    matrices = [matrix for layers in weights.projections.values() for matrix in layers if matrix.parameter in sizes]
    chosen = _choose(matrices, _as_map(assignment))
    found: dict[str, Assigned] = {}
    for name in dict.fromkeys(matrix.parameter for matrix in matrices):
        own = [matrix for matrix in matrices if matrix.parameter == name]
        specs = [chosen[_label(matrix)] for matrix in own]
        if ADAMW in specs:
            if any(spec != ADAMW for spec in specs):
                raise UserError(f"optimizer.assignment: {name} is fused; {ADAMW} takes all of it or nothing")
            found[name] = Assigned(own[0].module)
        elif split:
            _check_covered(name, own, sizes[name])
            blocks = [Block(spec, m.rows, m.columns, m.transposed) for m, spec in zip(own, specs, strict=True)]
            found[name] = Assigned(own[0].module, blocks)
        else:
            if any(spec != specs[0] for spec in specs):
                raise UserError(
                    f"optimizer.assignment: {name} is fused and has several constraints; set optimizer.fused=split"
                )
            found[name] = Assigned(own[0].module, [Block(specs[0], transposed=own[0].transposed)])
    return found


def _as_map(assignment: str | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(assignment, str):
        if assignment not in ASSIGNMENTS:
            near = difflib.get_close_matches(assignment, ASSIGNMENTS, n=1)
            raise UserError(
                f"optimizer.assignment must be one of {', '.join(ASSIGNMENTS)} or a map, got {assignment!r}"
                + (f"; did you mean {near[0]}?" if near else "")
            )
        return ASSIGNMENTS[assignment]
    if not isinstance(assignment, Mapping):
        raise UserError(f"optimizer.assignment must be one of {', '.join(ASSIGNMENTS)} or a map, got {assignment!r}")
    for key, spec in assignment.items():
        if spec == ADAMW:
            continue
        try:
            as_manifold(spec)
        except UserError as error:
            raise UserError(f"optimizer.assignment.{key}: {error} (or {ADAMW})") from error
    return assignment


def _choose(matrices: list[Matrix], wanted: Mapping[str, Any]) -> dict[str, ManifoldSpec]:
    """Returns label -> constraint; every matrix must be covered once, and every key must cover something."""
    roles = {matrix.module for matrix in matrices} | {matrix.projection for matrix in matrices}
    preset = wanted in ASSIGNMENTS.values()
    chosen: dict[str, tuple[str, ManifoldSpec]] = {}
    used = set()
    for matrix in matrices:
        for key, spec in wanted.items():
            if not _covers(key, matrix, roles):
                continue
            used.add(key)
            label = _label(matrix)
            if label in chosen:
                raise UserError(
                    f"optimizer.assignment: {label} ({matrix.parameter}) is covered by both {chosen[label][0]!r} and"
                    f" {key!r}; narrow one of them"
                )
            chosen[label] = (key, spec)
    bare = [matrix for matrix in matrices if _label(matrix) not in chosen]
    if bare:
        raise UserError(
            f"optimizer.assignment: nothing covers {_label(bare[0])} ({bare[0].parameter}); add"
            f" {bare[0].projection}: one of {', '.join([*MANIFOLDS, ADAMW])}"
        )
    idle = [key for key in wanted if key not in used]
    if idle and not preset:
        near = difflib.get_close_matches(idle[0], roles, n=1)
        raise UserError(
            f"optimizer.assignment: {idle[0]!r} covers no matrix; there are {', '.join(sorted(roles))}"
            + (f"; did you mean {near[0]}?" if near else "")
        )
    return {label: spec for label, (_, spec) in chosen.items()}


def _covers(key: str, matrix: Matrix, roles: set[str]) -> bool:
    if key in roles:
        return key in (matrix.module, matrix.projection)
    try:
        return any(re.search(key, name) for name in (_label(matrix), matrix.parameter))
    except re.error as error:
        raise UserError(f"optimizer.assignment: {key!r} is not a regular expression: {error}") from error


def _label(matrix: Matrix) -> str:
    return f"{matrix.projection}/layer_{matrix.depth:02d}"


def _check_covered(name: str, matrices: list[Matrix], shape: Iterable[int]) -> None:
    """The matrices of a fused parameter do not overlap (the weight map saw to that): they must fill it."""
    marks = torch.zeros(tuple(shape), dtype=torch.bool)
    for matrix in matrices:
        matrix.of(marks).fill_(True)
    if not bool(marks.all()):
        raise UserError(f"optimizer.assignment: no projection covers the whole of {name}; set optimizer.fused=whole")


def _groups(params: NamedParameters, found: Mapping[str, Assigned]) -> tuple[list[dict[str, Any]], NamedParameters]:
    """Returns Muon's parameter groups, one for each kind of parameter, and what is left."""
    groups: dict[str, dict[str, Any]] = {}
    rest = NamedParameters([])
    for name, parameter in params:
        assigned = found.get(name)
        if assigned is None or not assigned.blocks:
            rest.append((name, parameter))
            continue
        plain = assigned.blocks == [Block(assigned.blocks[0].manifold)]
        options = {"manifold": assigned.blocks[0].manifold} if plain else {"blocks": assigned.blocks}
        key = f"{assigned.module} {options}"
        group = groups.setdefault(key, {"params": [], "module": assigned.module, **options})
        group["params"].append((name, parameter))
    return list(groups.values()), rest


def _decayed(rest: NamedParameters, options: AdamWOptions) -> list[dict[str, Any]]:
    """Returns AdamW's groups: matrices with weight decay, vectors and scalars without."""
    matrices = [(name, p) for name, p in rest if p.ndim >= 2]
    others = [(name, p) for name, p in rest if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
