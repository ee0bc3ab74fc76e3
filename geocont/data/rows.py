"""Rows of text that can be read again and again, in one order: files, a column of a data set, or text in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geocont.data.cache import built_once, key_of, read_json, write_json
from geocont.errors import UserError

ROWS_AT_ONCE = 1000  # read from a data set


class Rows:
    """Base of what can be iterated over as text, one row after the other.

    Args:
        origin: Where the rows are from, for messages: ``data.path: /data/books (train)``.
    """

    def __init__(self, origin: str) -> None:
        self.origin = origin

    def __len__(self) -> int:
        raise NotImplementedError

    def __iter__(self) -> Iterator[str]:
        raise NotImplementedError

    def part(self, start: int, stop: int) -> Rows:
        """Returns the rows from ``start`` up to ``stop``."""
        raise NotImplementedError

    def known_as(self) -> str | None:
        """Returns a name that changes whenever the text does, if there is one that is cheaper than a hash of it."""
        return None


class MemoryRows(Rows):
    """Text in memory."""

    def __init__(self, texts: Sequence[str], origin: str) -> None:
        super().__init__(origin)
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def __iter__(self) -> Iterator[str]:
        return iter(self.texts)

    def part(self, start: int, stop: int) -> Rows:
        """Returns the rows from ``start`` up to ``stop``."""
        return MemoryRows(self.texts[start:stop], self.origin)


class FileRows(Rows):
    """UTF-8 text files, one row each, line ends as they are; one file at a time is in memory.

    Args:
        files: The files, in the order of the rows.
        origin: Where the rows are from, for messages.
        errors: What to do with bytes that are not UTF-8: ``strict`` refuses them, ``replace`` puts U+FFFD there.
    """

    def __init__(self, files: Sequence[Path], origin: str, errors: str = "strict") -> None:
        super().__init__(origin)
        self.files = files
        self.errors = errors

    def __len__(self) -> int:
        return len(self.files)

    def __iter__(self) -> Iterator[str]:
        for file in self.files:
            try:
                yield file.read_bytes().decode("utf-8", self.errors)
            except UnicodeDecodeError as error:
                raise UserError(f"data.path: {file} is not UTF-8 text (byte {error.start}); convert it") from error
            except OSError as error:
                raise UserError(f"data.path: {file} cannot be read: {error.strerror}") from error

    def part(self, start: int, stop: int) -> Rows:
        """Returns the rows from ``start`` up to ``stop``."""
        return FileRows(self.files[start:stop], self.origin, self.errors)


class ColumnRows(Rows):
    """A column of text of a ``datasets.Dataset``; a missing value is an empty row.

    Args:
        dataset: A ``datasets.Dataset``.
        column: One of its columns, of strings.
        origin: Where the rows are from, for messages.
    """

    def __init__(self, dataset: Any, column: str, origin: str) -> None:
        super().__init__(origin)
        self.dataset = dataset.select_columns([column])
        self.column = column

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[str]:
        for table in self.dataset.with_format("arrow").iter(ROWS_AT_ONCE):
            for text in table.column(self.column).to_pylist():
                yield text or ""

    def part(self, start: int, stop: int) -> Rows:
        """Returns the rows from ``start`` up to ``stop``."""
        return ColumnRows(self.dataset.select(range(start, stop)), self.column, self.origin)

    def known_as(self) -> str | None:
        """Returns the fingerprint by which ``datasets`` finds the rows in its own cache."""
        return str(self.dataset._fingerprint)


def hold_out(rows: Rows, share: float) -> tuple[Rows, Rows]:
    """Splits off the last ``share`` of the rows, at least one; of a single row, the last ``share`` of its characters.

    Returns:
        What remains, and what is held out.
    """
    if len(rows) == 1:
        (text,) = rows
        cut = round(len(text) * (1 - share))
        return MemoryRows([text[:cut]], rows.origin), MemoryRows([text[cut:]], rows.origin)
    count = len(rows)
    cut = max(min(1, count), count - max(1, round(share * count)))
    return rows.part(0, cut), rows.part(cut, count)


@dataclass(frozen=True)
class TextDigest:
    """What identifies a text, and its size.

    Attributes:
        sha256: Of its rows, hexadecimal.
        rows: Their number.
        characters: Their number.
        words: Runs of characters between white space, and an end for every row, also an empty one: WikiText's count.
    """

    sha256: str
    rows: int
    characters: int
    words: int


def digest(rows: Rows, root: Path) -> TextDigest:
    """Hashes the rows' content: where one row ends matters, but not the files they are in.

    Args:
        rows: The text.
        root: The cache, which keeps the hashes of data sets, so that a large one is read through only once.

    Raises:
        UserError: There is no text in any row.
    """
    name = rows.known_as()
    found = _hash(rows) if name is None else _remembered(rows, root / "digests" / key_of(format=2, name=name))
    if not found.characters:
        raise UserError(f"{rows.origin} is empty throughout: no text in {found.rows} rows; give one with text")
    return found


def _remembered(rows: Rows, folder: Path) -> TextDigest:
    file = folder / "digest.json"

    def read() -> TextDigest | None:
        values = read_json(file)
        if values is None:
            return None
        return TextDigest(str(values["sha256"]), int(values["rows"]), int(values["characters"]), int(values["words"]))

    return built_once(folder, read, lambda: write_json(file, vars(_hash(rows))))


def _hash(rows: Rows) -> TextDigest:
    content, count, characters, words = hashlib.sha256(), 0, 0, 0
    for row in rows:
        encoded = row.encode()
        content.update(len(encoded).to_bytes(8, "little"))
        content.update(encoded)
        count += 1
        characters += len(row)
        words += len(row.split()) + 1
    return TextDigest(content.hexdigest(), count, characters, words)
