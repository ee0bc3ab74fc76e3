"""The matrices of a checkpoint: which tensor, or which part of one, is ``q`` of layer 7."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import yaml
from torch import Tensor

from geocont.errors import UserError
from geocont.pretrained.checkpoint import Checkpoint, Piece, matrix_names
from geocont.pretrained.families import Cut, Norm, Plan, gguf_plan, hugging_face_plan, run_plan, unknown
from geocont.weights import Matrix, WeightMap, WeightPattern, canonical_name

if TYPE_CHECKING:
    from geocont.pretrained.difference import Entry

#: Parts of a model that are not its language model: their layers count from 0 as well.
FOREIGN = re.compile(
    r"(?:^|\.)(?:vision_tower|vision_model|vision_encoder|visual|audio_tower|audio_model|multi_modal_projector|mtp)\."
    r"|^(?:v|a|mm)\."
)
#: Names above this are no layer: a hostile file would ask for that many.
MOST_LAYERS = 10_000


@dataclass(frozen=True)
class View:
    """How a matrix lies in a tensor, before a :class:`~geocont.weights.Matrix` slices it.

    Attributes:
        tensor: Its name in the file.
        way: As in :class:`~geocont.pretrained.families.Cut`, or ``whole``.
        part: Which of ``q k v`` (0, 1, 2), or which expert.
        heads: Number of heads.
    """

    tensor: str
    way: Literal["whole", "heads", "halves", "experts"] = "whole"
    part: int = 0
    heads: int = 1


@dataclass(frozen=True)
class FileMatrix:
    """One weight matrix in a checkpoint.

    Attributes:
        matrix: Role and slice; its ``parameter`` is a name of the map's views.
        view: Where that lies.
        projection: ``q`` .. ``down``, without the expert.
        expert: Number of the expert, None where there is none.
        norms: (name of a norm's tensor, ``columns`` or ``rows`` that it multiplies).
        norm_offset: What is added to the norms' weights.
        checkpoint: That holds it.
    """

    matrix: Matrix
    view: View
    projection: str
    expert: int | None
    checkpoint: Checkpoint
    norms: tuple[tuple[str, Literal["columns", "rows"]], ...] = ()
    norm_offset: float = 0.0

    @property
    def depth(self) -> int:
        """Layer, from 0."""
        return self.matrix.depth

    @property
    def where(self) -> str:
        """File and tensor, for messages."""
        return f"{self.checkpoint.tensors[self.view.tensor].file}: tensor {self.view.tensor}"

    def describe(self) -> str:
        """Returns what makes the matrix of the bytes that :meth:`pieces` reads, for a hash."""
        m, v = self.matrix, self.view
        return f"{m.rows} {m.columns} {m.transposed} {v.way} {v.part} {v.heads} {self.norms} {self.norm_offset}"

    def pieces(self) -> list[Piece]:
        """Returns the part of the tensor that holds the matrix, its rows where they lie together, and the norms."""
        return [self._piece(), *(self.checkpoint.piece(name) for name, _ in self.norms)]

    def numbers(self, pieces: Sequence[Piece], device: torch.device) -> Tensor:
        """Returns the matrix ``(out, in)`` as float32 (float64 stays) of what :meth:`pieces` has read."""
        tensor, matrix = pieces[0].numbers(), self.matrix
        if self.view.way == "whole" and matrix.rows and not matrix.transposed:
            found = tensor[:, slice(*matrix.columns) if matrix.columns else slice(None)]
        else:
            found = matrix.of(_viewed(tensor, self.view))
        found = found.to(device)
        found = found if found.dtype == torch.float64 else found.float()
        for piece, (_, side) in zip(pieces[1:], self.norms, strict=True):
            weight = piece.numbers().to(found) + self.norm_offset
            found.mul_(weight if side == "columns" else weight[:, None])  # the bytes are mapped copy-on-write
        return found

    def _piece(self) -> Piece:
        if self.view.way == "experts":
            return self.checkpoint.piece(self.view.tensor, self.view.part, self.view.part + 1)
        if self.view.way == "whole" and self.matrix.rows and not self.matrix.transposed:
            return self.checkpoint.piece(self.view.tensor, *self.matrix.rows)
        return self.checkpoint.piece(self.view.tensor)


@dataclass
class MatrixTable:
    """All matrices of a checkpoint, in order of depth.

    Attributes:
        family: Name of the architecture, ``map`` for a map of one's own.
        sequences: The matrices that follow each other through depth: one sequence for each projection and expert.
        notes: What a person should know, a line each.
    """

    family: str
    sequences: list[list[Entry]]
    notes: list[str]


def find_matrices(checkpoint: Checkpoint, own_map: Path | None = None, fold_norms: bool = False) -> MatrixTable:
    """Finds the matrices of a checkpoint.

    Args:
        checkpoint: Open.
        own_map: YAML file, projection -> pattern, instead of what the configuration says.
        fold_norms: Whether matrices are multiplied by the norm weights before (columns) and after them (rows).

    Raises:
        UserError: The architecture is unknown, a matrix is missing, or does not fit the configuration.
    """
    names = {name: info for name, info in checkpoint.tensors.items() if not FOREIGN.search(name)}
    where = str(checkpoint.path)
    plan = _plan(checkpoint, where, own_map)
    if fold_norms and not plan.norms:
        raise UserError(f"--fold-norms: {where}: which norms belong to which matrix is not known for {plan.family}")
    views: dict[str, View] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, info in names.items():
        _check_rows(plan, info.shape, name, where)
        for shown, view, shape in _views(plan.cuts, name, info.shape):
            views[canonical_name(shown)], shapes[canonical_name(shown)] = view, shape
    found = _matched(plan, shapes, where)
    sequences: dict[tuple[str, int | None], list[FileMatrix]] = {}
    for matrix in found:
        projection, expert = _seat(matrix.projection)
        norms = _norms_of(matrix, plan.norms.get(matrix.projection), views, where) if fold_norms else ()
        entry = FileMatrix(matrix, views[matrix.parameter], projection, expert, checkpoint, norms, plan.norm_offset)
        sequences.setdefault((projection, expert), []).append(entry)
    for sequence in sequences.values():
        sequence.sort(key=lambda entry: entry.depth)
        _check_layers(sequence, plan, where)
    return MatrixTable(plan.family, [list(sequence) for sequence in sequences.values()], _notes(checkpoint, plan))


def _plan(checkpoint: Checkpoint, where: str, own_map: Path | None) -> Plan:
    if not checkpoint.tensors:
        raise UserError(f"{where}: there is no tensor in it")
    if own_map is not None:
        return Plan("map", None, _read_map(own_map))
    if checkpoint.kind == "gguf":
        return gguf_plan(checkpoint.config, where)
    if checkpoint.kind == "run":
        return run_plan(checkpoint.config, where)
    if not checkpoint.config:
        some = ", ".join(matrix_names(checkpoint.tensors.values())[:3])
        raise unknown(where, f"its architecture, for want of a config.json beside it (it has {some} ..),", ("known",))
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    try:
        return hugging_face_plan(checkpoint.config, str(folder / "config.json"))
    except UserError as error:
        some = ", ".join(matrix_names(checkpoint.tensors.values())[:3])
        raise UserError(f"{error}. It has {some} .." if "--map" in str(error) else str(error)) from error


def _read_map(path: Path) -> dict[str, WeightPattern]:
    try:
        content = yaml.safe_load(path.expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"--map: {path} cannot be read: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(content, dict) or not content:
        raise UserError(
            f"--map: {path} must have a line for each projection, such as 'q: layers\\.(\\d+)\\.wq\\.weight'"
        )
    patterns = {}
    for projection, given in content.items():
        options: Any = {"pattern": given} if isinstance(given, str) else given
        try:
            patterns[str(projection)] = WeightPattern(**options)
        except TypeError as error:
            keys = ", ".join(WeightPattern.__dataclass_fields__)
            raise UserError(f"--map: {path}: {projection} must be a regular expression or have keys {keys}") from error
    return patterns


def _views(cuts: tuple[Cut, ...], name: str, shape: tuple[int, ...]) -> list[tuple[str, View, tuple[int, ...]]]:
    """Returns (name, view, shape) of what a tensor is presented as: itself, unless a cut applies to it."""
    for cut in cuts:
        if not re.search(rf"(?:^|\.)(?:{cut.pattern})$", name):
            continue
        if cut.way == "experts" and len(shape) == 3:
            return [(f"{name}#{i}", View(name, "experts", i), shape[1:]) for i in range(min(shape[0], MOST_LAYERS))]
        if cut.way == "experts" or len(shape) != 2:
            continue
        if cut.way == "halves":
            _whole_heads(name, shape, 2 * cut.heads)
            return [(f"{name}#rows", View(name, "halves", heads=cut.heads), shape)]
        _whole_heads(name, shape, 3 * cut.heads)
        part = (shape[0] // 3, shape[1])
        return [(f"{name}#{p}", View(name, "heads", i, cut.heads), part) for i, p in enumerate("qkv")]
    return [(name, View(name), shape)]


def _whole_heads(name: str, shape: tuple[int, ...], parts: int) -> None:
    if shape[0] % parts:
        raise UserError(
            f"tensor {name} has {shape[0]} rows, which are not a multiple of {parts}, as its heads would be"
        )


def _viewed(tensor: Tensor, view: View) -> Tensor:
    if view.way == "experts":
        return tensor[0]
    if view.way == "heads":  # (heads, 3, head_dim, in)
        return tensor.unflatten(0, (view.heads, 3, -1))[:, view.part].flatten(0, 1)
    if view.way == "halves":  # (heads, head_dim / 2, 2, in) -> (heads, 2, head_dim / 2, in)
        return tensor.unflatten(0, (view.heads, -1, 2)).transpose(1, 2).flatten(0, 2)
    return tensor


def _check_rows(plan: Plan, shape: tuple[int, ...], name: str, where: str) -> None:
    for end, rows in plan.exact.items():
        if name.endswith(end) and len(shape) == 2:
            fused = shape[1] if any(p.transposed for p in plan.patterns.values()) else shape[0]
            if fused != rows:
                raise UserError(
                    f"{where}: tensor {name} has shape {list(shape)}, but the configuration's heads and sizes make"
                    f" {rows} of {fused}; it belongs to another model, or head_dim is missing"
                )


def _matched(plan: Plan, shapes: Mapping[str, tuple[int, ...]], where: str) -> list[Matrix]:
    """Matches patterns; those that layers may lack only where there is something."""
    by_expert: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        expert = re.search(r"\.experts\.(\d+)\.|#(\d+)$", name)
        if expert:
            by_expert.setdefault(expert[1] or expert[2], {})[name] = shape
    found: list[Matrix] = []
    required: dict[str, WeightPattern] = {}
    for projection, pattern in plan.patterns.items():
        if projection not in plan.partial:
            required[projection] = pattern
            continue
        expert = re.search(r"@(\d+)", projection)
        some = by_expert.get(expert[1], {}) if expert else shapes
        expression = re.compile(rf"(?:^|\.)(?:{pattern.pattern})$")
        matching = {name: shape for name, shape in some.items() if expression.search(name)}
        if matching:
            found += _map(where, {projection: pattern}, matching)
    return _map(where, required, shapes) + found if required else found


def _map(where: str, patterns: Mapping[str, WeightPattern], shapes: Mapping[str, tuple[int, ...]]) -> list[Matrix]:
    try:
        table = WeightMap.from_patterns(patterns, shapes)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    return [matrix for layers in table.projections.values() for matrix in layers]


def _seat(projection: str) -> tuple[str, int | None]:
    """``gate@3#packed`` -> (``gate``, 3)."""
    name, _, expert = projection.split("#")[0].partition("@")
    return name, int(expert) if expert else None


def _check_layers(sequence: list[FileMatrix], plan: Plan, where: str) -> None:
    depths = [entry.depth for entry in sequence]
    if len(set(depths)) < len(depths) or max(depths) >= MOST_LAYERS:
        raise UserError(f"{where}: {sequence[0].matrix.parameter}: layers {depths[:8]} do not count from 0")
    if plan.layers is None or sequence[0].matrix.projection in plan.partial:
        return
    missing = sorted(set(range(min(plan.layers, MOST_LAYERS))) - set(depths))
    if missing:
        model = sequence[0]
        lost = _layer_stem(model.matrix, missing[0]) + model.view.tensor[len(_layer_stem(model.matrix, model.depth)) :]
        raise UserError(
            f"{where}: tensor {lost} is not there, though the configuration has {plan.layers} layers; fetch it again"
        )


def _layer_stem(matrix: Matrix, depth: int) -> str:
    """Returns what names of a layer begin with, given one of its matrices: ``model.layers.7``."""
    match = re.search(rf"(?:^|\.){matrix.depth}(?=\.)", matrix.parameter)
    if match is None:
        return ""
    digits = len(str(matrix.depth))
    return matrix.parameter[: match.end() - digits] + str(depth)


def _norms_of(
    matrix: Matrix, norm: Norm | None, views: Mapping[str, View], where: str
) -> tuple[tuple[str, Literal["columns", "rows"]], ...]:
    found: list[tuple[str, Literal["columns", "rows"]]] = []
    if norm is None:
        return ()
    if norm.before:
        stem = _layer_stem(matrix, matrix.depth - 1 if norm.first else matrix.depth)
        name = f"{stem}.{norm.before}.weight"
        if norm.first and matrix.depth == 0:
            name = next((other for other in views if other.endswith(norm.first)), norm.first)
        found.append((name, "columns"))
    if norm.after:
        found.append((f"{_layer_stem(matrix, matrix.depth)}.{norm.after}.weight", "rows"))
    for name, _ in found:
        if name not in views:
            raise UserError(f"--fold-norms: {where}: tensor {name} is not there")
    return tuple((views[name].tensor, side) for name, side in found)


def _notes(checkpoint: Checkpoint, plan: Plan) -> list[str]:
    notes = []
    experts = {_seat(name)[1] for name in plan.patterns} - {None}
    if experts:
        notes.append(
            f"{len(experts)} experts: each is compared with the one of the same number in the next layer, which is"
            " related to it through the residual stream only"
        )
    tied = checkpoint.config.get("tie_word_embeddings")
    if tied:
        notes.append("head and embedding are one matrix (tied)")
    return notes
