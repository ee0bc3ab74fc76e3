"""Text for language models: blocks of consecutive tokens, cut from a stream that is tokenised once and mapped."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from geocont.data.cache import cache_root
from geocont.data.corpus import load_corpus
from geocont.data.loader import UNSCORED, ResumableLoader, evaluation_loader
from geocont.data.rows import Rows, TextDigest, digest
from geocont.data.tokenizer import Tokenizer, load_tokenizer
from geocont.data.tokens import TokenFile, tokenised
from geocont.errors import UserError


class Blocks(Dataset):
    """Consecutive blocks of a stream of tokens, each with its targets, which are the tokens one further.

    Block i is ``x = stream[i T : i T + T]``, ``y = stream[i T + 1 : i T + T + 1]``, so every token of the stream but
    the first is a target exactly once.

    Args:
        file: The stream.
        context: T, tokens a block.
        whole: Whether the last, partial block is kept, filled up with ends of text as inputs and -100 as targets;
            otherwise its tokens are left out.
    """

    def __init__(self, file: TokenFile, context: int, whole: bool) -> None:
        self.file = file
        self.context = context
        self.whole = whole
        self._stream: np.ndarray | None = None

    def __len__(self) -> int:
        targets = self.file.tokens - 1
        return -(-targets // self.context) if self.whole else targets // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.__getitems__([index])
        return x[0], y[0]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Returns blocks and their targets, both int64 ``(B, T)``; a block beyond the last has no scored target."""
        if self._stream is None:
            self._stream = self.file.open()
        places = np.asarray(indices)[:, None] * self.context + np.arange(self.context + 1)
        last = self.file.tokens - 1  # an end of text, with which a partial block is filled up
        window = self._stream[np.minimum(places, last)].astype(np.int64)
        targets = np.where(places[:, 1:] > last, UNSCORED, window[:, 1:])
        return torch.from_numpy(np.ascontiguousarray(window[:, :-1])), torch.from_numpy(targets)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stream": None}  # a worker maps the file itself; pickling would copy all of it


class Text(LightningDataModule):
    """Blocks of a text's tokens, to predict each token from those before it.

    A split is one stream: an end of text, then the rows in their order, each followed by an end of text (also where a
    row ends with a line end of its own; an empty row is an end of text alone). Batches are pairs ``(x, y)`` of int64
    ``(B, T)``. Training blocks come in a shuffled order that resumes in mid-epoch, without the last partial block;
    validation and test score every token once, the last block being filled up with targets of -100.

    Args:
        path: ``stdlib``, the source text of the installed Python's standard library, which needs no network; a folder
            with ``train*.parquet``, and ``validation*.parquet`` or ``test*.parquet`` if there are; a folder of ``.txt``
            files, named likewise or all of them to train on, one document each; one ``.txt`` file; or a name on the
            Hugging Face hub.
        config: Configuration of a data set on the hub that has several, as ``wikitext-103-raw-v1``.
        column: The column of text, in parquet and on the hub.
        tokenizer: ``bpe``, a byte-level BPE trained on the training split; ``bytes``, with 256 as the end of text; a
            tokenizer.json, or a folder with one; or a tokenizer's name on the hub, as ``gpt2``.
        vocabulary: Number of ids of the BPE that is to be trained, end of text included; ignored otherwise.
        context: T, tokens a sample.
        batch_size: Samples a step, on each rank.
        validation_share: What is held out of the training split where there is neither a validation nor a test split:
            the last rows, or the last characters of a single document; of ``stdlib``, files by a hash of their name.
        cache: Folder of token files; by default that in the environment's GEOCONT_CACHE, else ``~/.cache/geocont``.
        seed: Of the order of training samples (together with the epoch); by default that of ``seed_everything``.
        num_workers: Loader processes; 0, loading in the training process, is fastest for a mapped file.

    Raises:
        UserError: From ``prepare_data`` or ``setup``, where the data, the tokenizer or an option is wrong; in one line.
    """

    def __init__(
        self,
        path: str = "stdlib",
        config: str | None = None,
        column: str = "text",
        tokenizer: str = "bpe",
        vocabulary: int = 4096,
        context: int = 128,
        batch_size: int = 16,
        validation_share: float = 0.01,
        cache: str | None = None,
        seed: int | None = None,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.path = path
        self.config = config
        self.column = column
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary
        self.context = context
        self.batch_size = batch_size
        self.validation_share = validation_share
        self.cache = cache
        self.seed = seed
        self.num_workers = num_workers
        self._files: dict[str, TokenFile] = {}
        self._digests: dict[str, TextDigest] = {}

    def prepare_data(self) -> None:
        """Tokenises what the cache does not have; other processes that come by wait for it."""
        for split in ("train", "validation"):
            self.tokens(split)

    def setup(self, stage: str) -> None:
        """Opens the token files, so that whatever is wrong with the data is said before anything else starts."""
        self.prepare_data()
        if stage in ("test", "predict"):
            self.tokens("test")

    @property
    def vocabulary_size(self) -> int:
        """Number of ids, that of the end of text included; all ids lie below."""
        return self._encoder.vocabulary_size

    def fingerprint(self) -> str:
        """Returns a hash of the data as the model sees it: the tokens of training and validation, and their context."""
        hashes = [self.tokens(split).sha256[:16] for split in ("train", "validation")]
        return "-".join([*hashes, str(self.context)])

    def tokens_per_word(self, split: str) -> float:
        """Returns a split's scored tokens over its words, ends of rows included: what perplexity per word needs."""
        return (self.tokens(split).tokens - 1) / self._digest(split).words

    def tokens(self, split: str) -> TokenFile:
        """Returns the stream of ``train``, ``validation`` or ``test``; it is made where the cache does not have it."""
        if split not in self._files:
            rows = self._rows[split]
            file = tokenised(rows, self._digest(split), self._encoder, self._root)
            if split == "train" and file.tokens <= self.context:
                raise UserError(
                    f"data.context: one block of {self.context} takes {self.context + 1} tokens, {rows.origin} has"
                    f" {file.tokens}; give a shorter context or more text"
                )
            self._files[split] = file
        return self._files[split]

    @property
    def _root(self) -> Path:
        return cache_root(self.cache)

    @cached_property
    def _rows(self) -> dict[str, Rows]:
        if self.context < 1:
            raise UserError(f"data.context must be at least 1, got {self.context}")
        if not 0 < self.validation_share < 1:
            raise UserError(f"data.validation_share must lie between 0 and 1, got {self.validation_share}")
        return load_corpus(self.path, self.config, self.column, self.validation_share)

    def _digest(self, split: str) -> TextDigest:
        if split not in self._digests:
            self._digests[split] = digest(self._rows[split], self._root)
        return self._digests[split]

    @cached_property
    def _encoder(self) -> Tokenizer:
        return load_tokenizer(self.tokenizer, self.vocabulary, self._rows["train"], self._digest("train"), self._root)

    def train_dataloader(self) -> DataLoader:
        """Shuffled blocks; the last partial block, and the last incomplete batch of an epoch, are dropped."""
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) if self.seed is None else self.seed
        blocks = Blocks(self.tokens("train"), self.context, whole=False)
        return ResumableLoader(blocks, self.batch_size, seed, self.num_workers)

    def val_dataloader(self) -> DataLoader:
        """The validation split, in order and to its last token; the test split where there is none."""
        return self._in_order("validation")

    def test_dataloader(self) -> DataLoader:
        """The test split, in order and to its last token; the validation split where there is none."""
        return self._in_order("test")

    predict_dataloader = test_dataloader

    def _in_order(self, split: str) -> DataLoader:
        return evaluation_loader(Blocks(self.tokens(split), self.context, whole=True), self.batch_size)
