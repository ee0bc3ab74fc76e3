"""Text blocks: exact chunking, an order that resumes, splits, and what is said where something is wrong."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from geocont.data import Text, corpus
from geocont.data.corpus import load_corpus, stdlib_files
from geocont.data.text import Blocks
from geocont.errors import UserError

TRAIN = [f"row {i} of the training text\n" if i % 4 else "" for i in range(40)]
HELD_OUT = ["one held-out row", "", "日本語\n"]


@pytest.fixture(autouse=True)
def _caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEOCONT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")


def write(folder: Path, split: str, rows: list[Any], column: str = "text", kind: Any = None) -> Path:
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table({column: pa.array(rows, kind)}), folder / f"{split}-00000-of-00001.parquet")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "text", "train", TRAIN)
    return write(tmp_path / "text", "validation", HELD_OUT)


def data(path: Path, **options: Any) -> Text:
    module = Text(str(path), **{"tokenizer": "bytes", "context": 7, "batch_size": 3, "seed": 1, **options})
    module.prepare_data()
    module.setup("fit")
    return module


def stream_of(rows: list[str]) -> list[int]:
    return [256, *(i for row in rows for i in (*row.encode(), 256))]


def ids(loader: Any) -> list[tuple[int, ...]]:
    return [tuple(block.tolist()) for _, y in loader for block in y]


@pytest.mark.parametrize("batch_size", [1, 3, 16])
@pytest.mark.parametrize("context", [1, 7, 64])
def test_every_token_but_the_start_is_a_target_once(folder: Path, batch_size: int, context: int) -> None:
    """A token lost or scored twice at a block's border would make perplexities depend on the context."""
    module = data(folder, context=context, batch_size=batch_size)
    expected = stream_of(HELD_OUT)
    batches = list(module.val_dataloader())
    x, y = (torch.cat(parts).reshape(-1) for parts in zip(*batches, strict=True))
    scored = y != -100
    assert y[scored].tolist() == expected[1:]
    assert x[scored].tolist() == expected[:-1]
    assert scored[: len(expected) - 1].all()  # only the end is padding
    assert set(x[~scored].tolist()) <= {256}
    assert all(x.dtype == y.dtype == torch.int64 and x.shape == y.shape for x, y in batches)
    assert all(len(x) == batch_size for x, _ in batches[:-1])


def test_training_blocks_are_the_stream_without_its_last_partial_block(folder: Path) -> None:
    """Training must see all text whatever the batch size, and nothing that is not text."""
    expected = stream_of(TRAIN)
    whole = (len(expected) - 1) // 7
    blocks = [(expected[7 * i : 7 * i + 7], expected[7 * i + 1 : 7 * i + 8]) for i in range(whole)]
    for batch_size in (1, whole):
        loader = data(folder, batch_size=batch_size).train_dataloader()
        found = [(a.tolist(), b.tolist()) for x, y in loader for a, b in zip(x, y, strict=True)]
        assert sorted(found) == sorted(blocks)
        assert found != blocks  # shuffled
    assert len(expected) - 1 > whole * 7  # there is a partial block that was left out


@pytest.mark.parametrize("workers", [0, 2])
def test_resumes_on_the_next_block_in_mid_epoch(folder: Path, workers: int) -> None:
    """An interrupted run must see the very blocks that an uninterrupted one sees."""
    whole = ids(data(folder).train_dataloader())
    loader = data(folder, num_workers=workers).train_dataloader()
    iterator = iter(loader)
    seen = [tuple(block.tolist()) for _ in range(4) for block in next(iterator)[1]]
    state = loader.state_dict()  # type: ignore[attr-defined]
    other = data(folder, num_workers=workers).train_dataloader()
    other.load_state_dict(state)  # type: ignore[attr-defined]
    assert seen + ids(other) == whole
    assert ids(data(folder, seed=2).train_dataloader()) != whole


def test_blocks_travel_to_workers_without_the_stream(folder: Path) -> None:
    """Pickling a memory map copies all of the file into each worker."""
    blocks = Blocks(data(folder).tokens("train"), 7, whole=False)
    x, _ = blocks[2]
    assert len(pickle.dumps(blocks)) < 1500
    assert torch.equal(pickle.loads(pickle.dumps(blocks))[2][0], x)
    assert blocks.file.tokens * 2 > 1500


def test_setup_alone_is_enough_and_the_second_time_reads_the_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning calls prepare_data in one process only; a second run must not tokenise again."""
    module = Text(str(folder), context=7)
    module.setup("fit")
    monkeypatch.setattr("geocont.data.tokens.write_tokens", None)
    monkeypatch.setattr("geocont.data.tokenizer.train_bpe", None)
    again = Text(str(folder), context=7, batch_size=2)
    again.setup("fit")
    assert again.fingerprint() == module.fingerprint()
    assert again.vocabulary_size == module.vocabulary_size > 257


def test_fingerprint_follows_what_the_model_sees(folder: Path, tmp_path: Path) -> None:
    """The manifest's fingerprint tells whether two runs had the same data."""
    first = data(folder).fingerprint()
    assert data(folder, batch_size=1, vocabulary=999).fingerprint() == first
    assert data(folder, context=8).fingerprint() != first
    assert data(folder, tokenizer="bpe").fingerprint() != first
    write(tmp_path / "other", "train", [*TRAIN[:-1], "changed"])
    write(tmp_path / "other", "validation", HELD_OUT)
    assert data(tmp_path / "other").fingerprint() != first


def test_empty_rows_and_missing_values_are_rows(tmp_path: Path) -> None:
    """WikiText has an empty row wherever an article has an empty line; its perplexity counts them."""
    folder = write(tmp_path / "text", "train", ["ab", "", None, "c"])
    write(folder, "validation", ["", "x"])
    module = data(folder, context=2, batch_size=1)
    assert module.tokens("train").open().tolist() == stream_of(["ab", "", "", "c"])
    assert module.tokens("validation").open().tolist() == [256, 256, ord("x"), 256]


def test_which_split_validates(tmp_path: Path) -> None:
    """Held-out text that is also trained on would make every validation loss too good."""

    def splits(path: Path, share: float = 0.1) -> list[list[str]]:
        found = load_corpus(str(path), None, "text", share)
        return [list(found[split]) for split in ("train", "validation", "test")]

    only = write(tmp_path / "only", "train", TRAIN)
    assert splits(only) == [TRAIN[:36], TRAIN[36:], TRAIN[36:]]
    assert splits(only, 0.001)[1] == TRAIN[39:]
    assert splits(only, 0.999)[0] == TRAIN[:1]
    write(only, "test", ["t"])
    assert splits(only) == [TRAIN, ["t"], ["t"]]
    write(only, "validation", ["v"])
    assert splits(only) == [TRAIN, ["v"], ["t"]]
    module = data(only)
    module.setup("test")
    assert ids(module.test_dataloader())[0][:2] == (ord("t"), 256)


def test_text_files_are_documents_and_a_single_one_is_cut(tmp_path: Path) -> None:
    """Plain text needs no conversion, and its line ends stay as they are."""
    folder = tmp_path / "books"
    folder.mkdir()
    for name, text in (("b.txt", "second\r\n"), ("a.txt", "first\n"), ("validation.txt", "held out")):
        (folder / name).write_bytes(text.encode())
    module = data(folder, context=3, batch_size=1)
    assert module.tokens("train").open().tolist() == stream_of(["first\n", "second\r\n"])
    assert module.tokens("validation").open().tolist() == stream_of(["held out"])
    book = folder / "a.txt"
    book.write_text("é" * 100)
    module = data(book, context=3, validation_share=0.2)
    assert module.tokens("train").open().tolist() == stream_of(["é" * 80])
    assert module.tokens("validation").open().tolist() == stream_of(["é" * 20])


def test_what_is_wrong_is_said_in_one_line(folder: Path, tmp_path: Path) -> None:
    """Each message names the key and the value, so that the way out does not take reading the source."""

    def message(path: Path, **options: Any) -> str:
        with pytest.raises(UserError) as caught:
            data(path, **options).train_dataloader()
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert f"data.path: {tmp_path}/nowhere is not a folder; give one with train*" in message(tmp_path / "nowhere")
    assert "nowhere.txt is not a folder; give one" in message(tmp_path / "nowhere.txt")
    (tmp_path / "empty").mkdir()
    assert "empty has no train*.parquet and no *.txt to train on" in message(tmp_path / "empty")
    write(tmp_path / "half", "validation", HELD_OUT)
    assert f"data.path: {tmp_path}/half has no train*.parquet" in message(tmp_path / "half")
    assert f"data.column: there is no txt of {folder} (train), only text; did you mean text?" == message(
        folder, column="txt"
    )
    write(tmp_path / "numbers", "train", [1, 2])
    assert "(train) must be text, is int64; columns of text are: none" in message(tmp_path / "numbers")
    write(tmp_path / "blank", "train", ["", None, ""], kind=pa.string())
    assert "(train) is empty throughout: no text in" in message(tmp_path / "blank")
    tokens = len(stream_of(TRAIN))
    assert f"data.context: one block of {tokens} takes {tokens + 1} tokens, " in message(folder, context=tokens)
    assert data(folder, context=tokens - 1, batch_size=1).train_dataloader()
    assert "data.context must be at least 1, got 0" in message(folder, context=0)
    assert "data.batch_size must be from 1 to" in message(folder, batch_size=5000)
    assert "data.batch_size must be from 1 to" in message(folder, batch_size=0)
    assert "data.validation_share must lie between 0 and 1, got 1.0" in message(folder, validation_share=1.0)
    assert "data.vocabulary must be at least 257" in message(folder, tokenizer="bpe", vocabulary=100)
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    assert "latin.txt is not UTF-8 text (byte 0); convert it" in message(tmp_path / "latin.txt")
    (folder / "train-00000-of-00001.parquet").write_bytes(b"PAR1 but no more")
    assert "cannot be read" in message(folder)


class FakeHub:
    """Stands in for ``datasets.load_dataset``."""

    def __init__(self, found: Any) -> None:
        self.found = found
        self.asked: tuple[Any, ...] = ()

    def __call__(self, *asked: Any) -> Any:
        self.asked = asked
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


def test_a_name_on_the_hub_with_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """WikiText is one data set with four configurations; OpenWebText has a split ``train`` alone."""
    import datasets

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *_, **__: None)
    rows = datasets.Dataset.from_dict({"text": TRAIN})

    def load(found: Any, config: str | None = None) -> dict[str, Any]:
        hub = FakeHub(found)
        monkeypatch.setattr("datasets.load_dataset", hub)
        result = load_corpus("some/text", config, "text", 0.1)
        assert hub.asked == ("some/text", config)
        return result

    assert list(load({"train": rows, "extra": rows})["validation"]) == TRAIN[36:]
    assert list(load({"train": rows, "validation": rows}, "raw")["validation"]) == TRAIN
    with pytest.raises(UserError, match="^data.path: some/text has no split train, only extra$"):
        load({"extra": rows})
    missing = ValueError("Config name is missing.\nPlease pick one among the available configs: ['a', 'b']\nExample")
    with pytest.raises(UserError, match="^data.config: some/text has several; Please pick one among the .*'b'"):
        load(missing)


def test_without_any_option_the_standard_library_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default works without a network, and no file of it is in both splits."""
    chosen = ["abc.py", "bisect.py", "json/encoder.py", "json/decoder.py", "stat.py"]
    monkeypatch.setattr(corpus, "stdlib_files", lambda root: [root / name for name in chosen])
    module = Text(vocabulary=300)
    module.setup("fit")
    assert module.vocabulary_size == 300
    x, y = next(iter(module.train_dataloader()))
    assert x.shape == y.shape == (16, 128)
    assert torch.equal(x[:, 1:], y[:, :-1])
    splits = load_corpus("stdlib", None, "text", 0.01)
    names = {split: {file.name for file in splits[split].files} for split in ("train", "validation")}  # type: ignore[attr-defined]
    assert names == {"train": {"abc.py", "bisect.py", "decoder.py"}, "validation": {"encoder.py", "stat.py"}}
    monkeypatch.setattr(corpus, "stdlib_files", lambda root: [root / "abc.py"])
    with pytest.raises(UserError, match="data.path: stdlib has 1 files in .*data.validation_share=0.01 holds out 0"):
        load_corpus("stdlib", None, "text", 0.01)


def test_the_standard_librarys_files_are_sorted_capped_and_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installed packages differ from machine to machine, and tests are most of the standard library."""
    for name in ("json/b.py", "json/a.py", "json/tests/t.py", "abc.py", "site-packages/x.py", "test/y.py", "mine.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1234567890")
    (tmp_path / "json/__init__.py").write_text("")

    def names() -> list[str]:
        return [file.relative_to(tmp_path).as_posix() for file in stdlib_files(tmp_path)]

    assert names() == ["abc.py", "json/a.py", "json/b.py"]
    monkeypatch.setattr(corpus, "STDLIB_BYTES", 20)
    assert names() == ["abc.py", "json/a.py"]


def test_validation_leaves_the_global_random_state_alone(folder: Path) -> None:
    """How often a run validates must not change what it trains on."""
    module = data(folder)
    before = torch.get_rng_state()
    list(module.val_dataloader())
    list(module.train_dataloader())
    assert torch.equal(torch.get_rng_state(), before)


def test_perplexity_covers_the_same_tokens_whatever_the_context(folder: Path) -> None:
    """A mean over blocks would weigh the padded one like the others; torch ignores what is not scored."""

    def total(context: int) -> float:
        logits: Tensor = torch.from_numpy(np.random.default_rng(0).normal(size=(257, 257)))
        losses = [
            torch.nn.functional.cross_entropy(logits[x].flatten(0, 1), y.flatten(), reduction="sum")
            for x, y in data(folder, context=context).val_dataloader()
        ]
        return float(torch.stack(losses).sum())

    assert total(5) == pytest.approx(total(64)) == pytest.approx(total(1))
