"""What separates two checkpoints of one model: their matrices' differences, read like matrices of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from geocont.errors import UserError
from geocont.pretrained.checkpoint import Piece
from geocont.pretrained.matrices import FileMatrix, MatrixTable
from geocont.weights import Matrix


@dataclass(frozen=True)
class Difference:
    """One matrix of a checkpoint less that of another; the two may be of different formats.

    Attributes:
        new: The matrix.
        base: What is taken off it.
    """

    new: FileMatrix
    base: FileMatrix

    @property
    def matrix(self) -> Matrix:
        """Role of both."""
        return self.new.matrix

    @property
    def projection(self) -> str:
        """Projection of both."""
        return self.new.projection

    @property
    def expert(self) -> int | None:
        """Expert of both."""
        return self.new.expert

    @property
    def depth(self) -> int:
        """Layer of both."""
        return self.new.depth

    @property
    def where(self) -> str:
        """File and tensor, for messages."""
        return self.new.where

    def describe(self) -> str:
        """Returns what makes the difference of the bytes that :meth:`pieces` reads."""
        return f"{self.new.describe()} - {self.base.describe()}"

    def pieces(self) -> list[Piece]:
        """Returns the pieces of both."""
        return [*self.new.pieces(), *self.base.pieces()]

    def numbers(self, pieces: Sequence[Piece], device: torch.device) -> Tensor:
        """Returns the difference ``(out, in)`` of what :meth:`pieces` has read."""
        count = 1 + len(self.new.norms)
        new = self.new.numbers(pieces[:count], device)
        base = self.base.numbers(pieces[count:], device)
        if new.shape != base.shape:
            raise UserError(
                f"--against: {self.where} is {list(new.shape)}, but {self.base.where} is {list(base.shape)}"
            )
        return new.sub_(base)  # in place, for large matrices: the bytes are mapped copy-on-write


Entry = FileMatrix | Difference


def differences(new: MatrixTable, base: MatrixTable) -> MatrixTable:
    """Pairs the matrices of two checkpoints by projection, expert and layer.

    Raises:
        UserError: One of them has a matrix that the other lacks.
    """
    seats = {
        (m.projection, m.expert, m.depth): m
        for sequence in base.sequences
        for m in sequence
        if isinstance(m, FileMatrix)
    }
    ours = {(m.projection, m.expert, m.depth) for sequence in new.sequences for m in sequence}
    lone = next(iter(sorted(ours ^ seats.keys(), key=str)), None)
    if lone is not None:
        lacking = "--against" if lone in ours else "the model"
        raise UserError(f"--against: {lacking} has no {lone[0]} of layer {lone[2]}; both must be of one model")
    pairs: list[list[Entry]] = [
        [Difference(m, seats[m.projection, m.expert, m.depth]) for m in sequence if isinstance(m, FileMatrix)]
        for sequence in new.sequences
    ]
    return MatrixTable(new.family, pairs, new.notes)
