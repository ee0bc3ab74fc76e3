"""Safetensors files: a strict reading of the header, so that a hostile one is one line instead of a crash.

Format: 8 bytes of length n, n bytes of JSON (name -> dtype, shape, data_offsets), then the data. Nothing executes.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
from pathlib import Path
from typing import Any

from geocont.errors import UserError
from geocont.pretrained.mapped import TensorInfo

#: Header lengths above this are refused, as the format's own library does.
LONGEST_HEADER = 100_000_000
ITEM_SIZES = {
    **{"F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2},
    **{"F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1},
}


def safetensors_tensors(path: Path) -> dict[str, TensorInfo]:
    """Returns what a safetensors file holds, after checking that all of it is there.

    Raises:
        UserError: The file is not there, is cut short, or its header contradicts itself; in one line with the tensor.
    """
    header, start, end = _header(path)
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            found[name] = _tensor(path, name, entry, start, end)
    _refuse_overlap(path, list(found.values()))
    return found


def _header(path: Path) -> tuple[dict[str, Any], int, int]:
    """Returns the header, the first byte of the data, and the length of the file."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            first = file.read(8)
            length = struct.unpack("<Q", first)[0] if len(first) == 8 else None
            if length is None or length > size - 8 or length > LONGEST_HEADER:
                raise UserError(f"{path}: {_what_else(first + file.read(24), size, length)}")
            text = file.read(length)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_without_repetition)
    except RecursionError as error:
        raise UserError(f"{path}: not a safetensors file: its header nests too deeply") from error
    except ValueError as error:
        raise UserError(f"{path}: not a safetensors file: its header is not JSON: {_brief(error)}") from error
    if not isinstance(header, dict):
        raise UserError(f"{path}: not a safetensors file: its header is not a table of tensors")
    return header, 8 + length, size


def _what_else(beginning: bytes, size: int, length: int | None) -> str:
    """Says what a file seems to be whose first eight bytes are no length of a header."""
    if not size:
        return "the file is empty; fetch it again"
    if beginning.startswith(b"version https://git-lfs"):
        return "a pointer of Git LFS, not the safetensors file itself; fetch that with `git lfs pull`"
    text = " ".join(beginning.decode("ascii", errors="replace").split())
    if text.isprintable() and "\N{REPLACEMENT CHARACTER}" not in text:
        return f"not a safetensors file: it begins with the text {text!r}; fetch it again"
    if length is None:
        return f"not a safetensors file: it has {size} bytes; fetch it again"
    return (
        f"not a whole safetensors file, or none at all: its header should be {length} bytes long, but the file has"
        f" {size}; fetch it again"
    )


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r:.200} is there twice")
    return table


def _tensor(path: Path, name: str, entry: Any, start: int, end: int) -> TensorInfo:
    def refuse(what: str) -> UserError:
        return UserError(f"{path}: tensor {name!r:.200}: {what}; fetch the file again")

    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise refuse("its header has no dtype, shape and data_offsets")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in ITEM_SIZES:
        raise refuse(f"the type {kind!r:.40} is unknown")
    if not _all_natural(shape) or not _all_natural(offsets) or len(offsets) != 2:
        raise refuse(f"the shape {shape!r:.80} or the offsets {offsets!r:.80} are not natural numbers")
    first, last = offsets
    if not first <= last <= end - start:
        raise refuse(f"it should end at byte {start + last}, but the file has {end} bytes")
    if math.prod(shape) * ITEM_SIZES[kind] != last - first:
        raise refuse(f"{shape!r:.80} numbers of type {kind} do not fill {last - first} bytes")
    return TensorInfo(name, tuple(shape), kind, path, start + first, last - first)


def _all_natural(values: Any) -> bool:
    return isinstance(values, list) and len(values) < 16 and all(type(v) is int and 0 <= v < 2**62 for v in values)


def _refuse_overlap(path: Path, tensors: list[TensorInfo]) -> None:
    ordered = sorted((t for t in tensors if t.size), key=lambda t: t.offset or 0)
    for one, other in itertools.pairwise(ordered):
        if (one.offset or 0) + one.size > (other.offset or 0):
            raise UserError(f"{path}: tensors {one.name!r:.200} and {other.name!r:.200} lie on the same bytes")


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
