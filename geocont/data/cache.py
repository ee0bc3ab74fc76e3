"""Files that are built once, under a key that says what they are made of; a build that was killed leaves none."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

from filelock import FileLock

from geocont.errors import UserError

DEFAULT_ROOT = "~/.cache/geocont"

T = TypeVar("T")


def cache_root(option: str | None = None) -> Path:
    """Returns the cache's folder: the option, else the environment's GEOCONT_CACHE, else ``~/.cache/geocont``."""
    return Path(option or os.environ.get("GEOCONT_CACHE") or DEFAULT_ROOT).expanduser().absolute()


def key_of(**parts: str | int) -> str:
    """Returns a hash of what something is made of; the same in every process and on every machine."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def built_once(folder: Path, read: Callable[[], T | None], build: Callable[[], None]) -> T:
    """Returns what ``read`` finds in a folder; where it finds nothing, one process builds it and the others wait.

    Args:
        folder: Where the files are; created before ``build`` runs. The lock lies beside it.
        read: Returns None unless all of it is there.
        build: Writes the files; each through :func:`replacing`, and last the one that ``read`` looks for first.

    Raises:
        UserError: The folder cannot be written.
    """
    found = read()
    if found is not None:
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            found = read()
            if found is None:
                build()
                found = read()
    except OSError as error:
        raise UserError(
            f"data.cache: {folder} cannot be written: {error.strerror or error}; give another folder, there or as"
            " GEOCONT_CACHE"
        ) from error
    if found is None:
        raise RuntimeError(f"what was just built in {folder} is not there")
    return found


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Opens a file for writing that takes its place, in one step, when all is written. Needs the folder's lock."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def write_json(path: Path, values: dict[str, str | int]) -> None:
    """Writes a small JSON file in one step. Needs the folder's lock."""
    with replacing(path) as file:
        file.write((json.dumps(values, indent=2) + "\n").encode())


def read_json(path: Path) -> dict[str, str | int] | None:
    """Returns a JSON file's object, or None where there is no such file or it is not a whole one."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return values if isinstance(values, dict) else None
