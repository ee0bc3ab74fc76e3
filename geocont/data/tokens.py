"""Files of tokens, mapped into memory: written once for a text and a tokenizer, in bounded memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from geocont.data.cache import built_once, key_of, read_json, replacing, write_json
from geocont.data.rows import Rows, TextDigest
from geocont.data.tokenizer import Tokenizer

FORMAT = 1  # part of the key: raise it wherever the same text would become other tokens

ROWS_AT_ONCE = 1000  # encoded together; of long rows fewer
CHARACTERS_AT_ONCE = 1_000_000  # a longer row is encoded in pieces, cut after a line end


@dataclass(frozen=True)
class TokenFile:
    """The stream of a text's tokens: an end of text, then each row followed by an end of text.

    So the first token of the text has something to be predicted from, and every token but the start is a target.

    Attributes:
        path: Raw little-endian ids, without a header.
        dtype: ``<u2`` where the vocabulary has at most 65,536 ids, else ``<u4``.
        tokens: Length of the stream.
        vocabulary_size: Number of ids that the tokenizer has.
        end_of_text: The id of starts and ends.
        sha256: Of the file's content, hexadecimal.
    """

    path: Path
    dtype: str
    tokens: int
    vocabulary_size: int
    end_of_text: int
    sha256: str

    def open(self) -> np.ndarray:
        """Returns the stream ``(tokens,)``, mapped into memory and read-only."""
        return np.memmap(self.path, dtype=self.dtype, mode="r", shape=(self.tokens,))


def tokenised(rows: Rows, text: TextDigest, tokenizer: Tokenizer, root: Path) -> TokenFile:
    """Returns the tokens of a text; they are made where the cache does not have them.

    Args:
        rows: The text.
        text: Its digest, which with the tokenizer's identity is the key in the cache.
        tokenizer: What makes ids from text.
        root: The cache.

    Raises:
        UserError: The cache cannot be written.
    """
    folder = root / "tokens" / key_of(format=FORMAT, text=text.sha256, tokenizer=tokenizer.identity)
    return built_once(folder, lambda: _read(folder), lambda: write_tokens(rows, text, tokenizer, folder))


def _read(folder: Path) -> TokenFile | None:
    """Returns a whole file of tokens, or None; its description is written last."""
    path, values = folder / "tokens.bin", read_json(folder / "tokens.json")
    if values is None or not path.is_file():
        return None
    file = TokenFile(
        path,
        str(values["dtype"]),
        int(values["tokens"]),
        int(values["vocabulary_size"]),
        int(values["end_of_text"]),
        str(values["sha256"]),
    )
    return file if path.stat().st_size == file.tokens * np.dtype(file.dtype).itemsize else None


def write_tokens(rows: Rows, text: TextDigest, tokenizer: Tokenizer, folder: Path) -> None:
    """Encodes a text into ``tokens.bin`` in a folder, and describes it in ``tokens.json`` beside it."""
    path, dtype = folder / "tokens.bin", "<u2" if tokenizer.vocabulary_size <= 2**16 else "<u4"
    content, count = hashlib.sha256(), 0
    with replacing(path) as file:
        for ids in _encoded(rows, tokenizer):
            encoded = ids.astype(dtype).tobytes()
            content.update(encoded)
            file.write(encoded)
            count += len(ids)
    done = TokenFile(path, dtype, count, tokenizer.vocabulary_size, tokenizer.end_of_text, content.hexdigest())
    description: dict[str, str | int] = {
        **asdict(done),
        "path": path.name,
        "origin": rows.origin,
        "tokenizer": tokenizer.name,
        "tokenizer_identity": tokenizer.identity,
        "tokenizer_file": tokenizer.file,
        "text_sha256": text.sha256,
        "rows": text.rows,
        "characters": text.characters,
        "format": FORMAT,
    }
    write_json(folder / "tokens.json", description)


def _encoded(rows: Rows, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    end = np.array([tokenizer.end_of_text])
    yield end
    for texts, ends in _together(rows):
        parts = [
            part for ids, last in zip(tokenizer.encode(texts), ends, strict=True) for part in (ids, end)[: 1 + last]
        ]
        yield np.concatenate(parts)


def _together(rows: Rows) -> Iterator[tuple[list[str], list[bool]]]:
    """Yields texts to encode at once, and for each whether it is the end of its row."""
    texts: list[str] = []
    ends: list[bool] = []
    characters = 0
    for row in rows:
        pieces = list(_pieces(row))
        for number, piece in enumerate(pieces, 1):
            if texts and (len(texts) == ROWS_AT_ONCE or characters + len(piece) > CHARACTERS_AT_ONCE):
                yield texts, ends
                texts, ends, characters = [], [], 0
            texts.append(piece)
            ends.append(number == len(pieces))
            characters += len(piece)
    if texts:
        yield texts, ends


def _pieces(row: str) -> Iterator[str]:
    start = 0
    while len(row) - start > CHARACTERS_AT_ONCE:
        limit = start + CHARACTERS_AT_ONCE
        cut = row.rfind("\n", start, limit) + 1 or limit
        yield row[start:cut]
        start = cut
    yield row[start:]
