"""WeightMap: which matrix plays which role at which depth.

Optimizer assignment, callbacks, the analysis of checkpoints and reports all ask the same question: which matrix is
``q`` of layer 7, and does it read from the residual stream or write to it? One table answers it. It holds names and
slices only, never tensors, so the same map reads a module's parameters, their gradients, and the tensors of a file.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from geocont.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

Side = Literal["reads", "writes", "both"]

#: What a projection does to the residual stream, and the module it belongs to. The theory (arXiv 2605.04971) expects
#: continuity of right singular vectors (``v1``) where a matrix reads, and of left ones (``u1``) where it writes.
ROLES: dict[str, tuple[str, Side]] = {
    "q": ("attention", "reads"),
    "k": ("attention", "reads"),
    "v": ("attention", "reads"),
    "o": ("attention", "writes"),
    "gate": ("mlp", "reads"),
    "up": ("mlp", "reads"),
    "down": ("mlp", "writes"),
    "hidden": ("mlp", "both"),
}


@dataclass(frozen=True)
class WeightPattern:
    """Where the matrices of one projection lie.

    Attributes:
        pattern: Regular expression for parameter names. It must match from the start of a name or a dot to the end of
            the name; the first group is the depth, counted from 0 (without a group, matches are numbered in order).
        rows: First and last + 1 output row of the projection in a fused parameter; all rows by default.
        columns: First and last + 1 input column; all columns by default.
        transposed: True where the parameter is stored in x out (Conv1D of GPT-2); rows and columns then count after
            transposing.
        module: ``attention`` or ``mlp``; by default what is usual for a projection of that name, otherwise ``mlp``.
        side: Whether the projection ``reads`` from the residual stream, ``writes`` to it, or ``both``; by default what
            is usual for a projection of that name, otherwise ``both``.
    """

    pattern: str
    rows: tuple[int, int] | None = None
    columns: tuple[int, int] | None = None
    transposed: bool = False
    module: str | None = None
    side: Side | None = None


def part_of(tensor: Tensor, rows: tuple[int, int] | None, columns: tuple[int, int] | None, transposed: bool) -> Tensor:
    """Returns a part of a parameter, out x in, as a view; rows and columns count after transposing, None means all."""
    matrix = tensor.mT if transposed else tensor
    return matrix[slice(*rows) if rows else slice(None), slice(*columns) if columns else slice(None)]


@dataclass(frozen=True)
class Matrix:
    """One weight matrix: a parameter, or a slice of one, with its role."""

    parameter: str
    projection: str
    depth: int
    module: str
    side: Side
    rows: tuple[int, int] | None = None
    columns: tuple[int, int] | None = None
    transposed: bool = False

    def of(self, tensor: Tensor) -> Tensor:
        """Returns this matrix, out x in, as a view of the parameter (or of its gradient)."""
        return part_of(tensor, self.rows, self.columns, self.transposed)

    def overlaps(self, other: Matrix) -> bool:
        """Tells whether two matrices share an entry of the same parameter."""

        def disjoint(a: tuple[int, int] | None, b: tuple[int, int] | None) -> bool:
            return a is not None and b is not None and (a[1] <= b[0] or b[1] <= a[0])

        if self.parameter != other.parameter:
            return False
        return not (disjoint(self.rows, other.rows) or disjoint(self.columns, other.columns))


def canonical_name(name: str) -> str:
    """Removes what ``torch.compile`` puts into parameter names, so that names do not depend on it."""
    return name.replace("_orig_mod.", "")


class WeightMap:
    """The table (projection, depth) -> :class:`Matrix`.

    Attributes:
        projections: For each projection, its matrices in order of depth.
        unmatched: Names of the two-dimensional parameters that no pattern covers (embeddings and heads, as a rule).
    """

    def __init__(self, matrices: Iterable[Matrix], unmatched: Sequence[str] = ()) -> None:
        self.projections: dict[str, list[Matrix]] = {}
        for matrix in matrices:
            self.projections.setdefault(matrix.projection, []).append(matrix)
        for layers in self.projections.values():
            layers.sort(key=lambda matrix: matrix.depth)
        self.unmatched = tuple(unmatched)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of all parameters that hold a mapped matrix, without repetition."""
        return tuple(dict.fromkeys(m.parameter for layers in self.projections.values() for m in layers))

    def gather(self, projection: str, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Returns the matrices of one projection in order of depth, as views of ``tensors`` (parameter -> tensor)."""
        return [matrix.of(tensors[matrix.parameter]) for matrix in self.projections[projection]]

    @classmethod
    def from_patterns(
        cls, patterns: Mapping[str, str | WeightPattern | Mapping[str, Any]], shapes: Mapping[str, Sequence[int]]
    ) -> WeightMap:
        """Builds the map of a model from one pattern per projection.

        Args:
            patterns: Projection -> :class:`WeightPattern`, or only its regular expression.
            shapes: Parameter name -> shape. Names are taken without ``_orig_mod.``.

        Raises:
            UserError: A pattern is not a regular expression or matches nothing, a parameter is matched twice, is not a
                matrix, or has fewer rows or columns than its slice asks for.
        """
        sizes = {canonical_name(name): tuple(shape) for name, shape in shapes.items()}
        matrices: list[Matrix] = []
        for projection, given in patterns.items():
            pattern = _as_pattern(projection, given)
            found = list(_matches(projection, pattern, sizes))
            if not found:
                near = _suggest(pattern.pattern, sizes)
                raise UserError(f"weights.{projection}: no parameter matches {pattern.pattern!r}; {near}")
            matrices += found
        _refuse_double(matrices)
        covered = {matrix.parameter for matrix in matrices}
        unmatched = [name for name, shape in sizes.items() if len(shape) == 2 and name not in covered]
        return cls(matrices, unmatched)


def _as_pattern(projection: str, given: str | WeightPattern | Mapping[str, Any]) -> WeightPattern:
    try:
        if isinstance(given, str):
            return WeightPattern(given)
        return given if isinstance(given, WeightPattern) else WeightPattern(**given)
    except TypeError as error:
        keys = ", ".join(WeightPattern.__dataclass_fields__)
        raise UserError(f"weights.{projection}: {given!r} must be a regular expression or have keys {keys}") from error


def _matches(projection: str, pattern: WeightPattern, shapes: Mapping[str, tuple[int, ...]]) -> Iterable[Matrix]:
    try:
        expression = re.compile(rf"(?:^|\.)(?:{pattern.pattern})$")
    except re.error as error:
        raise UserError(f"weights.{projection}: {pattern.pattern!r} is not a regular expression: {error}") from error
    module, side = ROLES.get(projection, ("mlp", "both"))
    count = 0
    for name, shape in shapes.items():
        match = expression.search(name)
        if match is None:
            continue
        _check_shape(projection, pattern, name, shape)
        depth = match.group(1) if expression.groups else str(count)
        if depth is None or not depth.isdigit():
            raise UserError(
                f"weights.{projection}: the first group of {pattern.pattern!r} must be a depth, got {depth!r}"
            )
        yield Matrix(
            parameter=name,
            projection=projection,
            depth=int(depth),
            module=pattern.module or module,
            side=pattern.side or side,
            rows=(pattern.rows[0], pattern.rows[1]) if pattern.rows else None,
            columns=(pattern.columns[0], pattern.columns[1]) if pattern.columns else None,
            transposed=pattern.transposed,
        )
        count += 1


def _check_shape(projection: str, pattern: WeightPattern, name: str, shape: tuple[int, ...]) -> None:
    if len(shape) != 2:
        raise UserError(f"weights.{projection}: {name} has shape {shape}, but only matrices have singular vectors")
    out_in = shape[::-1] if pattern.transposed else shape
    if pattern.side not in (None, "reads", "writes", "both"):
        raise UserError(f"weights.{projection}: side must be reads, writes or both, got {pattern.side!r}")
    for what, part, size in (("rows", pattern.rows, out_in[0]), ("columns", pattern.columns, out_in[1])):
        if part and not (len(part) == 2 and 0 <= part[0] < part[1] <= size):
            raise UserError(f"weights.{projection}: {what} {list(part)} do not lie within the {size} of {name}")


def _refuse_double(matrices: Sequence[Matrix]) -> None:
    by_parameter: dict[str, list[Matrix]] = {}
    seats: dict[tuple[str, int], Matrix] = {}
    for matrix in matrices:
        for other in by_parameter.setdefault(matrix.parameter, []):
            if matrix.overlaps(other):
                raise UserError(
                    f"weights: {matrix.parameter} is matched twice, by {other.projection} and {matrix.projection};"
                    " narrow one pattern, or give both `rows` that do not overlap"
                )
        by_parameter[matrix.parameter].append(matrix)
        seat = (matrix.projection, matrix.depth)
        if seat in seats:
            raise UserError(
                f"weights.{matrix.projection}: {seats[seat].parameter} and {matrix.parameter} both have depth"
                f" {matrix.depth}; the first group of the pattern must count the layers"
            )
        seats[seat] = matrix


def _suggest(pattern: str, shapes: Mapping[str, tuple[int, ...]]) -> str:
    names = [name for name, shape in shapes.items() if len(shape) == 2]
    plain = pattern.replace("\\", "").replace("(d+)", "0")
    near = difflib.get_close_matches(plain, names, n=3, cutoff=0.3) or names[:3]
    return f"the nearest matrices are {', '.join(near)}" if near else "the model has no two-dimensional parameter"
