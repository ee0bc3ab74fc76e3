"""Tensors in files, mapped into memory a piece at a time: what is read is resident only while it is used."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from geocont.errors import UserError

#: Types that hold weights, by their names in safetensors files.
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies.

    Attributes:
        name: As the file has it.
        shape: In PyTorch's order, rows first.
        kind: Type of its numbers: ``BF16``, ``Q4_K``, ``I8``.
        file: That holds it.
        offset: First byte in the file; None where PyTorch finds it.
        size: In bytes.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    file: Path
    offset: int | None
    size: int


class MappedBytes:
    """A range of a file, mapped copy-on-write; closed when the last tensor that uses it is gone.

    Raises:
        UserError: The file has become shorter, or cannot be read.
    """

    def __init__(self, path: Path, offset: int, size: int, name: str) -> None:
        before = offset % mmap.ALLOCATIONGRANULARITY
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), before + size, access=mmap.ACCESS_COPY, offset=offset - before)
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: tensor {name} cannot be read: {error}; the file may have changed") from error
        self.array = np.frombuffer(self._map, dtype=np.uint8, count=size, offset=before)

    def release(self) -> None:
        """Drops the pages that are resident; they are read again when they are used."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Returns the bytes as a tensor, without a copy."""
        if not len(self.array):
            return torch.empty(shape, dtype=dtype)
        return torch.from_numpy(self.array).view(dtype).view(shape)


def readable_size(size: float) -> str:
    """Returns bytes as a person reads them: ``117 MB``."""
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
