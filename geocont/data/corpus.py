"""Where text comes from: a folder, the Hugging Face hub or, without any network, Python's own standard library."""

from __future__ import annotations

import difflib
import hashlib
import sys
import sysconfig
from pathlib import Path
from typing import Any

from geocont.data.hub import is_local, load_splits
from geocont.data.rows import ColumnRows, FileRows, Rows, hold_out
from geocont.errors import UserError

STDLIB = "stdlib"
STDLIB_BYTES = 12_000_000  # at most; files beyond it, at the end of the alphabet, are left out
#: Packages of the standard library that are tables, tests or programs of their own rather than a library's text.
STDLIB_SKIPPED = {"encodings", "ensurepip", "idlelib", "lib2to3", "test", "turtledemo"}

SPLITS = ("train", "validation", "test")


def load_corpus(path: str, config: str | None, column: str, validation_share: float) -> dict[str, Rows]:
    """Finds a corpus; no text is read yet.

    Args:
        path: ``stdlib``; a folder of parquet files named after their split (``train-0.parquet``) or of text files
            (likewise, or all of them to train on), one document each; one ``.txt`` file; or a name on the hub.
        config: Configuration of a data set on the hub that has several; has no meaning elsewhere.
        column: The column of text, in parquet and on the hub.
        validation_share: Of the training rows, held out from their end where there is neither a split ``validation``
            nor a split ``test``; of files, by a hash of their name, in ``stdlib``.

    Returns:
        The rows of ``train``, ``validation`` and ``test``. Validation and test stand in for each other.

    Raises:
        UserError: There is no such folder, data set, split or column, or the column is not text; in one line.
    """
    if path == STDLIB:
        found = _standard_library(validation_share)
    else:
        found = _text_files(path) or _columns(path, config, column)
    if "validation" not in found and "test" in found:
        found["validation"] = found["test"]
    if "validation" not in found:
        found["train"], found["validation"] = hold_out(found["train"], validation_share)
    found.setdefault("test", found["validation"])
    return found


def _text_files(path: str) -> dict[str, Rows]:
    """Returns the rows of text files; of nothing where the path is a folder of parquet or a name on the hub."""
    if not is_local(path):
        return {}
    place = Path(path).expanduser()
    if place.suffix == ".txt" and place.is_file():
        return {"train": FileRows([place], f"data.path: {place}")}
    if not place.is_dir():
        raise UserError(
            f"data.path: {place} is not a folder; give one with train*.parquet or *.txt, one .txt file, a name on the"
            f" Hugging Face hub, or {STDLIB}"
        )
    if any(place.glob("*.parquet")):
        return {}
    files = sorted(place.glob("*.txt"))
    named = {split: [file for file in files if file.name.startswith(split)] for split in SPLITS}
    held_out = {*named["validation"], *named["test"]}
    named["train"] = named["train"] or [file for file in files if file not in held_out]
    if not named["train"]:
        raise UserError(f"data.path: {place} has no train*.parquet and no *.txt to train on")
    return {split: FileRows(found, f"data.path: {place} ({split})") for split, found in named.items() if found}


def _columns(path: str, config: str | None, column: str) -> dict[str, Rows]:
    found = load_splits(path, SPLITS, config=config, optional=("validation", "test"))
    return {split: _column(rows, column, f"{column} of {path} ({split})") for split, rows in found.items()}


def _column(rows: Any, column: str, where: str) -> Rows:
    if column not in rows.column_names:
        near = difflib.get_close_matches(column, rows.column_names, n=1)
        raise UserError(
            f"data.column: there is no {where}, only {', '.join(sorted(rows.column_names))}"
            + (f"; did you mean {near[0]}?" if near else "")
        )
    kind = rows.features[column]
    if getattr(kind, "dtype", None) not in ("string", "large_string"):
        texts = [name for name, other in rows.features.items() if getattr(other, "dtype", None) == "string"]
        raise UserError(
            f"data.column: {where} must be text, is {getattr(kind, 'dtype', type(kind).__name__)}; columns of text are:"
            f" {', '.join(sorted(texts)) or 'none'}"
        )
    return ColumnRows(rows, column, f"data.column: {where}")


def _standard_library(share: float) -> dict[str, Rows]:
    """Splits the installed standard library's files by their name, so that a file's split is the same everywhere."""
    root = Path(sysconfig.get_path("stdlib"))
    files = stdlib_files(root)
    held_out = [file for file in files if _position(file.relative_to(root).as_posix()) < share]
    aside = set(held_out)
    train = [file for file in files if file not in aside]
    if not train or not held_out:
        raise UserError(
            f"data.path: {STDLIB} has {len(files)} files in {root}, of which data.validation_share={share} holds out"
            f" {len(held_out)}; change the share, or give a folder of text"
        )
    origin = f"data.path: {STDLIB} in {root}"
    return {
        "train": FileRows(train, f"{origin} (train)", errors="replace"),
        "validation": FileRows(held_out, f"{origin} (validation)", errors="replace"),
    }


def stdlib_files(root: Path) -> list[Path]:
    """Returns the source files of the standard library in a folder, sorted, without tests and installed packages."""
    names = sys.stdlib_module_names - STDLIB_SKIPPED
    found = [root / f"{name}.py" for name in names] + [file for name in names for file in (root / name).rglob("*.py")]
    files, total = [], 0
    for file in sorted(found, key=lambda file: file.relative_to(root).as_posix()):
        if not file.is_file() or {"test", "tests"} & set(file.relative_to(root).parts):
            continue
        size = file.stat().st_size
        total += size
        if total > STDLIB_BYTES:
            break
        if size:
            files.append(file)
    return files


def _position(name: str) -> float:
    """Returns a number from 0 to 1 that depends on the name only."""
    return int.from_bytes(hashlib.blake2b(name.encode()).digest()[:8], "big") / 2**64
