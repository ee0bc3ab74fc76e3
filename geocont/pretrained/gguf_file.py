"""GGUF files (llama.cpp): our own strict reading of the header, the ``gguf`` library for what is quantised.

The library's reader trusts the counts in a file; here every read is checked against the file's length, so that a
corrupt file is one line. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from geocont.errors import UserError
from geocont.pretrained.mapped import FLOATS, TensorInfo

MAGIC = b"GGUF"
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
#: Limits no real file comes near: entries of an array, their nesting, keys, tensors, dimensions.
LONGEST_ARRAY, DEEPEST, MOST_KEYS, MOST_TENSORS, MOST_DIMENSIONS = 50_000_000, 3, 100_000, 1_000_000, 4
KEPT_ENTRIES = 4096  # of an array; longer ones (vocabularies) are skipped
LONGEST_TEXT = 1 << 16  # kept of a string; chat templates are longer than any name
ROWS_AT_A_TIME = 1 << 22  # numbers dequantised at a time, which bounds what the library needs beside its result


def gguf_library() -> Any:
    """Returns the ``gguf`` package.

    Raises:
        UserError: It is not installed.
    """
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise UserError("GGUF files need the gguf library: pip install 'geocont[pretrained]'") from error
    return gguf


def gguf_tensors(path: Path) -> tuple[dict[str, TensorInfo], dict[str, Any]]:
    """Returns what a GGUF file holds, and its metadata (long arrays left out).

    Raises:
        UserError: The file is cut short or its header contradicts itself, or the ``gguf`` library is missing.
    """
    library = gguf_library()
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(path, _Cursor(path, data), library)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as a GGUF file: {error}") from error


class _Cursor:
    """Reads a mapped file from the start to its end, never beyond."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.position = path, data, 0

    def take(self, size: int) -> bytes:
        self.skip(size)
        return self.data[self.position - size : self.position]

    def skip(self, size: int) -> None:
        if size > len(self.data) - self.position:
            raise UserError(
                f"{self.path}: not a whole GGUF file: its header goes on after the last of {len(self.data)} bytes"
            )
        self.position += size

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def text(self) -> str:
        length = self.number("Q")
        kept = self.take(min(length, LONGEST_TEXT))
        self.skip(length - len(kept))
        return kept.decode("utf-8", errors="replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == STRING:
            return self.text()
        if kind != ARRAY or depth >= DEEPEST:
            raise UserError(f"{self.path}: not a GGUF file: type {kind} of a value is unknown")
        inner, count = self.number("I"), self.number("Q")
        if count > LONGEST_ARRAY:
            raise UserError(f"{self.path}: not a GGUF file: an array of {count} entries")
        if inner in SCALARS and count > KEPT_ENTRIES:
            return self.skip(count * struct.calcsize("<" + SCALARS[inner]))
        entries = []
        for _ in range(count):
            entry = self.value(inner, depth + 1)
            if count <= KEPT_ENTRIES:
                entries.append(entry)
        return entries


def _read(path: Path, cursor: _Cursor, library: Any) -> tuple[dict[str, TensorInfo], dict[str, Any]]:
    if cursor.take(4) != MAGIC:
        raise UserError(f"{path}: not a GGUF file: it does not begin with GGUF")
    version = cursor.number("I")
    if version not in (2, 3):
        raise UserError(f"{path}: GGUF version {version} is not one of 2 and 3, or the file is corrupt")
    count, keys = cursor.number("Q"), cursor.number("Q")
    if count > MOST_TENSORS or keys > MOST_KEYS:
        raise UserError(f"{path}: not a GGUF file: {count} tensors and {keys} keys")
    metadata = {}
    for _ in range(keys):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.number("I"))
    entries = []
    for _ in range(count):
        name, dimensions = cursor.text(), cursor.number("I")
        if dimensions > MOST_DIMENSIONS:
            raise UserError(f"{path}: tensor {name!r:.200} has {dimensions} dimensions; the file is corrupt")
        shape = tuple(cursor.number("Q") for _ in range(dimensions))[::-1]  # the file counts from the fastest one
        entries.append((name, shape, cursor.number("I"), cursor.number("Q")))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20:
        raise UserError(f"{path}: general.alignment is {alignment!r}; the file is corrupt")
    start = -(-cursor.position // alignment) * alignment
    found: dict[str, TensorInfo] = {}
    for name, shape, code, offset in entries:
        if name in found:
            raise UserError(f"{path}: tensor {name!r:.200} is there twice")
        found[name] = _tensor(path, name, shape, code, start + offset, len(cursor.data), library)
    return found, metadata


def _tensor(
    path: Path, name: str, shape: tuple[int, ...], code: int, offset: int, end: int, library: Any
) -> TensorInfo:
    try:
        kind = library.GGMLQuantizationType(code)
        block, block_bytes = library.GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError) as error:
        raise UserError(
            f"{path}: tensor {name!r:.200} has type {code}, which the gguf library does not know"
        ) from error
    numbers = math.prod(shape)
    if (shape[-1] if shape else 1) % block:
        raise UserError(f"{path}: tensor {name!r:.200}: rows of {shape[-1]} are not whole blocks of {kind.name}")
    size = numbers // block * block_bytes
    if offset + size > end:
        raise UserError(
            f"{path}: tensor {name!r:.200} should end at byte {offset + size}, but the file has {end}; fetch it again"
        )
    return TensorInfo(name, shape, kind.name, path, offset, size)


def dequantise(data: np.ndarray, kind: str, shape: tuple[int, ...], name: str, file: Path) -> Tensor:
    """Returns the numbers of quantised bytes as float32 of the given shape; types that are floats stay as they are.

    Raises:
        UserError: The library cannot dequantise this type.
    """
    if kind in FLOATS:
        return torch.from_numpy(data).view(FLOATS[kind]).view(shape)
    library = gguf_library()
    quantisation = library.GGMLQuantizationType[kind]
    block, block_bytes = library.GGML_QUANT_SIZES[quantisation]
    width = shape[-1]
    rows = data.reshape(-1, width // block * block_bytes)
    numbers = np.empty((len(rows), width), dtype=np.float32)
    step = max(1, ROWS_AT_A_TIME // width)
    try:
        with np.errstate(all="ignore"):  # scales of a corrupt file overflow; the row says that it is not finite
            for i in range(0, len(rows), step):
                numbers[i : i + step] = library.quants.dequantize(rows[i : i + step], quantisation)
    except (NotImplementedError, ValueError) as error:
        raise UserError(f"{file}: tensor {name} has type {kind}, which the gguf library cannot dequantise") from error
    return torch.from_numpy(numbers).view(shape)
