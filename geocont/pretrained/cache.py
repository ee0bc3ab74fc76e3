"""Results kept by the hash of what they were computed from, so that a stopped analysis goes on where it was."""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from geocont.errors import UserError
from geocont.pretrained.checkpoint import Piece, as_bytes

#: Changes whenever the same matrices would give other values.
VERSION = "1"
CHUNK = 1 << 24  # bytes hashed before the pages are let go


def digest(description: str, pieces: list[Piece]) -> str:
    """Returns a hash of pieces of a file; they are read from the disk in passing and do not stay in memory."""
    found = hashlib.blake2b(description.encode(), digest_size=20)
    for piece in pieces:
        found.update(f"{piece.info.kind} {piece.shape}".encode())
        if isinstance(piece.data, Tensor):
            found.update(as_bytes(piece.data).data)
            continue
        for start in range(0, len(piece.data.array), CHUNK):
            found.update(piece.data.array[start : start + CHUNK].data)
            piece.data.release()
    return found.hexdigest()


def key_of(*parts: str) -> str:
    """Returns the key of a result: a hash of what it depends on."""
    return hashlib.blake2b("\n".join((VERSION, *parts)).encode(), digest_size=20).hexdigest()


class ResultCache:
    """A folder with a small file for each result; without a folder it keeps nothing.

    Args:
        folder: Made when the first result is kept.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def get(self, key: str) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
        """Returns the values and arrays kept under a key, None where there are none or the file is damaged."""
        if self._folder is None:
            return None
        try:
            with np.load(self._folder / f"{key}.npz", allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            values = json.loads(arrays.pop("values").tobytes())
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None
        return values, arrays

    def put(self, key: str, values: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        """Keeps a result; what is killed in between leaves no half of one.

        Raises:
            UserError: The disk is full, or the folder cannot be written.
        """
        if self._folder is None:
            return
        content = io.BytesIO()
        text = np.frombuffer(json.dumps(values).encode(), dtype=np.uint8)
        np.savez(content, values=text, **arrays)  # type: ignore[arg-type]
        target = self._folder / f"{key}.npz"
        temporary = target.with_name(f".{key}.{os.getpid()}.tmp")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(content.getvalue())
            os.replace(temporary, target)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise UserError(
                f"{self._folder}: a result cannot be kept: {error.strerror or error}; those before are, and the same"
                " command goes on from there"
            ) from error
