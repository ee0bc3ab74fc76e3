"""Tokenizers: bytes, a byte-level BPE trained on the corpus, and those of a tokenizer.json here or on the hub."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from geocont.data.cache import built_once, key_of, replacing
from geocont.data.hub import fetch_tokenizer, is_local
from geocont.data.rows import Rows, TextDigest
from geocont.errors import UserError

BYTES, BPE = "bytes", "bpe"
BYTE_VALUES = 256
END_OF_TEXT = "<|endoftext|>"
#: Tokens that may end a text, the first that a tokenizer has; one that has none gets an id of its own.
ENDS_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")

TRAINING_CHARACTERS = 50_000_000  # of the training split's beginning, on which a BPE is trained at most


class Tokenizer(Protocol):
    """What makes ids from text.

    Attributes:
        name: What the user asked for.
        identity: Changes whenever any text might get other ids.
        file: The tokenizer.json, or nothing for bytes.
        vocabulary_size: Number of ids, that of the end of text included; all ids lie below.
        end_of_text: The id that follows each row.
    """

    name: str
    identity: str
    file: str
    vocabulary_size: int
    end_of_text: int

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of each text, without any start or end."""

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids; an end of text is nothing."""


class ByteTokenizer:
    """The bytes of UTF-8, 0 to 255; 256 is the end of text."""

    name = identity = BYTES
    file = ""
    vocabulary_size = BYTE_VALUES + 1
    end_of_text = BYTE_VALUES

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of each text, without any start or end."""
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids; an end of text is nothing, and bytes that are not UTF-8 become U+FFFD."""
        return bytes(i for i in ids if i < BYTE_VALUES).decode("utf-8", "replace")


class FileTokenizer:
    """A tokenizer.json of Hugging Face ``tokenizers``.

    Text is only ever text: where it spells a special token, that is split into ordinary tokens. A file's settings for
    truncation, padding and start or end tokens are not used.

    Args:
        file: The tokenizer.json.
        name: What the user asked for.

    Raises:
        UserError: The file is not a tokenizer.json.
    """

    def __init__(self, file: Path, name: str) -> None:
        import tokenizers

        try:
            content = file.read_bytes()
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # tokenizers raises plain Exception
            reason = str(error).split("\n")[0][:200]
            raise UserError(
                f"data.tokenizer: {file} is not a tokenizer.json that can be read ({reason}); save one with"
                " tokenizers.Tokenizer.save"
            ) from error
        self.name, self.file = name, str(file)
        self.identity = hashlib.sha256(content).hexdigest()
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        ids = self._tokenizer.get_vocab()
        end = next((ids[token] for token in ENDS_OF_TEXT if token in ids), None)
        after_last = max(ids.values(), default=-1) + 1
        self.end_of_text = after_last if end is None else end
        self.vocabulary_size = max(after_last, self.end_of_text + 1)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of each text, without any start or end."""
        with _parallel():
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids; an end of text is nothing."""
        return self._tokenizer.decode([i for i in ids if i != self.end_of_text], skip_special_tokens=False)


def load_tokenizer(name: str, vocabulary: int, train: Rows, text: TextDigest, root: Path) -> Tokenizer:
    """Returns a tokenizer; a BPE is trained once and kept in the cache.

    Args:
        name: ``bytes``; ``bpe``; a tokenizer.json, or a folder with one; or a tokenizer's name on the hub.
        vocabulary: Number of ids of a BPE that is to be trained, of which 256 are bytes and one is the end of text. A
            small text may yield fewer.
        train: What a BPE is trained on: at most the first 50 million characters.
        text: The digest of ``train``.
        root: The cache.

    Raises:
        UserError: There is no such tokenizer, or the vocabulary is too small; in one line.
    """
    if name == BYTES:
        return ByteTokenizer()
    if name == BPE:
        return FileTokenizer(_trained(vocabulary, train, text, root), name)
    if name.endswith(".json") or is_local(name):
        file = Path(name).expanduser().absolute()
        file = file / "tokenizer.json" if file.is_dir() else file
        if not file.is_file():
            raise UserError(f"data.tokenizer: {file} is not there; give a tokenizer.json, {BPE}, {BYTES}, or gpt2")
        return FileTokenizer(file, name)
    return FileTokenizer(fetch_tokenizer(name), name)


def _trained(vocabulary: int, train: Rows, text: TextDigest, root: Path) -> Path:
    smallest = BYTE_VALUES + 1
    if vocabulary < smallest:
        raise UserError(
            f"data.vocabulary must be at least {smallest} for tokenizer {BPE} (256 bytes and the end of text), got"
            f" {vocabulary}"
        )
    folder = (
        root
        / "tokenizers"
        / key_of(format=1, kind=BPE, vocabulary=vocabulary, text=text.sha256, characters=TRAINING_CHARACTERS)
    )
    file = folder / "tokenizer.json"
    return built_once(folder, lambda: file if file.is_file() else None, lambda: train_bpe(train, vocabulary, file))


def train_bpe(rows: Rows, vocabulary: int, file: Path) -> None:
    """Trains a byte-level BPE and writes its tokenizer.json, whose id 0 is the end of text."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    bytewise: Any = pre_tokenizers.ByteLevel
    tokenizer.pre_tokenizer = bytewise(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(bytewise.alphabet()),
        show_progress=False,
    )
    with _parallel():
        tokenizer.train_from_iterator(_beginning(rows), trainer)
    with replacing(file) as output:
        output.write(tokenizer.to_str().encode())


def _beginning(rows: Rows) -> Iterator[str]:
    """Yields rows up to the number of characters to train on; the last one is cut there."""
    left = TRAINING_CHARACTERS
    for row in rows:
        yield row[:left]
        left -= len(row)
        if left <= 0:
            return


_process_that_ruled = 0


@contextlib.contextmanager
def _parallel() -> Iterator[None]:
    """Uses all cores, unless the environment says otherwise, and afterwards rules it out.

    Older ``tokenizers`` warn in each process that is forked later, as data loaders' are, unless it was ruled in
    or out; and its threads do not survive a fork, so a forked process must not use them.
    """
    global _process_that_ruled
    if "TOKENIZERS_PARALLELISM" in os.environ and _process_that_ruled != os.getpid():
        yield
        return
    _process_that_ruled = os.getpid()
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    try:
        yield
    finally:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
