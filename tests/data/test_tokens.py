"""Tokenizers and token files: exact streams, built once, found again by content, whole or not at all."""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from geocont.data import tokenizer as tokenizer_module
from geocont.data import tokens as tokens_module
from geocont.data.cache import key_of
from geocont.data.rows import FileRows, MemoryRows, Rows, TextDigest, digest, hold_out
from geocont.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, load_tokenizer
from geocont.data.tokens import TokenFile, tokenised
from geocont.errors import UserError

TEXTS = [
    "the cat sat on the mat\n",
    "",
    "naïve café — 東京 🐈 \u0000 \r\n  the end",
    "<|endoftext|> is only text",
    "the mat the cat the hat\n" * 20,
]


def rows(texts: list[str] = TEXTS) -> MemoryRows:
    return MemoryRows(texts, "data.path: memory")


def bpe(root: Path, texts: list[str] = TEXTS, vocabulary: int = 300) -> Tokenizer:
    return load_tokenizer("bpe", vocabulary, rows(texts), digest(rows(texts), root), root)


def file_of(tokenizer: Tokenizer, root: Path, texts: list[str] = TEXTS) -> TokenFile:
    return tokenised(rows(texts), digest(rows(texts), root), tokenizer, root)


def texts_of(stream: np.ndarray, tokenizer: Tokenizer) -> list[str]:
    """Cuts a stream at its ends of text and decodes what lies between."""
    ends = np.flatnonzero(stream == tokenizer.end_of_text)
    assert ends[0] == 0
    assert ends[-1] == len(stream) - 1
    return [tokenizer.decode(stream[a + 1 : b].tolist()) for a, b in itertools.pairwise(ends)]


def test_a_stream_is_an_end_of_text_and_then_each_row_followed_by_one(tmp_path: Path) -> None:
    """The stream is what perplexity is taken over: an empty row counts as one token, and nothing else is added."""
    stream = file_of(ByteTokenizer(), tmp_path, ["ab", "", "é"]).open()
    assert stream.tolist() == [256, 97, 98, 256, 256, 0xC3, 0xA9, 256]
    assert stream.dtype == "<u2"
    assert not stream.flags.writeable


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_text_comes_back_byte_by_byte(kind: str, tmp_path: Path) -> None:
    """Multi-byte characters, control characters and the spelling of a special token are text like any other."""
    tokenizer = ByteTokenizer() if kind == "bytes" else bpe(tmp_path)
    file = file_of(tokenizer, tmp_path)
    assert texts_of(file.open(), tokenizer) == TEXTS
    assert int(file.open().max()) < file.vocabulary_size == tokenizer.vocabulary_size
    assert kind == "bytes" or tokenizer.vocabulary_size == 300


def test_encoding_in_small_pieces_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded by encoding a few rows, or pieces of a long one, at a time; the stream must not show it."""
    tokenizer = bpe(tmp_path / "a")
    whole = file_of(tokenizer, tmp_path / "a").path.read_bytes()
    monkeypatch.setattr(tokens_module, "ROWS_AT_ONCE", 2)
    assert file_of(tokenizer, tmp_path / "b").path.read_bytes() == whole
    monkeypatch.setattr(tokens_module, "CHARACTERS_AT_ONCE", 10)
    cut = file_of(tokenizer, tmp_path / "c").open()
    assert texts_of(cut, tokenizer) == TEXTS
    byte = ByteTokenizer()
    assert file_of(byte, tmp_path / "c").sha256 == tokens_of_bytes(TEXTS)


def tokens_of_bytes(texts: list[str]) -> str:
    ids = [256, *(i for text in texts for i in (*text.encode(), 256))]
    return hashlib.sha256(np.array(ids, dtype="<u2").tobytes()).hexdigest()


def test_a_bpe_is_trained_once_and_on_no_more_than_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A BPE for a corpus of many gigabytes must not take hours, and a second run must not train another one."""
    monkeypatch.setattr(tokenizer_module, "TRAINING_CHARACTERS", 30)
    short = bpe(tmp_path / "a")
    assert "hat" not in json.loads(Path(short.file).read_text())["model"]["vocab"]
    monkeypatch.setattr(tokenizer_module, "train_bpe", _refuse)
    assert bpe(tmp_path / "a").identity == short.identity
    with pytest.raises(AssertionError, match="built again"):
        bpe(tmp_path / "a", vocabulary=299)


def _refuse(*_: object, **__: object) -> None:
    raise AssertionError("built again")


def test_the_cache_follows_text_and_tokenizer_but_not_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of another text under one key would be silently wrong; a touched file must not be tokenised again."""
    byte = ByteTokenizer()
    paths = {
        file_of(byte, tmp_path).path,
        file_of(byte, tmp_path, ["ab", "c"]).path,
        file_of(byte, tmp_path, ["a", "bc"]).path,
        file_of(byte, tmp_path, ["abc"]).path,
        file_of(bpe(tmp_path), tmp_path).path,
        file_of(bpe(tmp_path, vocabulary=280), tmp_path).path,
    }
    assert len(paths) == 6
    file = tmp_path / "a.txt"
    file.write_text("abc")
    os.utime(file, (1, 1))
    monkeypatch.setattr(tokens_module, "write_tokens", _refuse)
    from_file = FileRows([file], "data.path: file")
    assert tokenised(from_file, digest(from_file, tmp_path), byte, tmp_path).path in paths


SCRIPT = """
import sys, types
package = types.ModuleType("geocont.data")  # without the data modules, whose imports take seconds
package.__path__ = [sys.argv[1]]
sys.modules["geocont.data"] = package
from pathlib import Path
from geocont.data.rows import FileRows, digest
from geocont.data.tokenizer import load_tokenizer
from geocont.data.tokens import tokenised
root, rows = Path(sys.argv[2]), FileRows([Path(sys.argv[3])] * 2, "")
text = digest(rows, root)
file = tokenised(rows, text, load_tokenizer("bpe", 400, rows, text, root), root)
print(file.path.relative_to(root), file.sha256)
"""


def test_two_fresh_processes_agree_on_keys_and_tokens(tmp_path: Path) -> None:
    """Python's own hashes differ from process to process; a key that used them would never be found again."""
    here = str(Path(tokens_module.__file__).parent)
    said = []
    for seed in ("1", "2"):
        command = [sys.executable, "-c", SCRIPT, here, str(tmp_path / seed), __file__]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        said.append(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert said[0] == said[1] != ""


def _build(root: Path, log: Path, barrier: Any) -> None:
    def counted(what: str, original: Any) -> Any:
        def build(*arguments: Any) -> None:
            with log.open("a") as file:
                file.write(f"{what}\n")
            original(*arguments)

        return build

    tokenizer_module.train_bpe = counted("bpe", tokenizer_module.train_bpe)
    tokens_module.write_tokens = counted("tokens", tokens_module.write_tokens)
    barrier.wait()
    file = file_of(bpe(root), root)
    (log.parent / f"{os.getpid()}.sum").write_text(file.sha256 + str(file.path))


def test_four_processes_that_start_at_once_build_once(tmp_path: Path) -> None:
    """Ranks of one training, or jobs of a sweep, start together; two writers of one file would corrupt it."""
    fork = multiprocessing.get_context("fork")
    barrier, log = fork.Barrier(4), tmp_path / "log"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking where there are threads
        workers = [fork.Process(target=_build, args=(tmp_path / "cache", log, barrier)) for _ in range(4)]
        for worker in workers:
            worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert log.read_text().split() == ["bpe", "tokens"]
    sums = [file.read_text() for file in tmp_path.glob("*.sum")]
    assert len(sums) == 4
    assert len(set(sums)) == 1
    assert not list(tmp_path.rglob("*.partial"))


class Killed(MemoryRows):
    """Rows whose reading stops the process, as far as the cache can tell."""

    def __iter__(self) -> Any:
        yield "half of it"
        raise KeyboardInterrupt


def test_what_a_killed_build_left_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a token file that passes for a whole one would train on half the data without a word."""
    byte, text = ByteTokenizer(), digest(rows(), tmp_path)
    monkeypatch.setattr(tokens_module, "ROWS_AT_ONCE", 1)
    with pytest.raises(KeyboardInterrupt):
        tokenised(Killed(TEXTS, ""), text, byte, tmp_path)
    assert [file.name for file in tmp_path.rglob("tokens*.*") if file.is_file()] == ["tokens.bin.partial"]
    file = tokenised(rows(), text, byte, tmp_path)
    whole = file.path.read_bytes()
    description = file.path.with_name("tokens.json")
    for damage in (
        lambda: file.path.write_bytes(whole[:-2]),
        file.path.unlink,
        description.unlink,
        lambda: description.write_text('{"tokens": 1'),
        lambda: description.write_text("[]"),
    ):
        damage()
        assert tokenised(rows(), text, byte, tmp_path).path.read_bytes() == whole
    assert sorted(file.name for file in file.path.parent.iterdir()) == ["tokens.bin", "tokens.json"]
    assert json.loads(description.read_text())["rows"] == len(TEXTS)


def test_a_large_vocabulary_takes_four_bytes_a_token(tmp_path: Path) -> None:
    """Ids beyond 65,535 would wrap around silently in two bytes."""
    words = {f"w{i}": i for i in range(70_000)}
    path = save(tmp_path, tokenizers.Tokenizer(models.WordLevel(words, unk_token="w0")), pre_tokenizers.Whitespace())
    tokenizer = FileTokenizer(path, "words")
    file = file_of(tokenizer, tmp_path, ["w69999 w3"])
    assert file.open().tolist() == [70_000, 69_999, 3, 70_000]  # no token of its own for the end of text: one more id
    assert (file.dtype, file.vocabulary_size) == ("<u4", 70_001)


def save(folder: Path, tokenizer: Any, pre_tokenizer: Any) -> Path:
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_a_files_truncation_padding_and_template_lose_and_add_nothing(tmp_path: Path) -> None:
    """Many tokenizer.json on the hub carry the settings of their model: cut after 512 tokens, add [CLS] and [SEP]."""
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0, "</s>": 1, "[CLS]": 2}, unk_token="a"))
    words.add_special_tokens(["</s>", "[CLS]"])
    words.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 2)])
    words.enable_truncation(3)
    words.enable_padding(length=6)
    tokenizer = FileTokenizer(save(tmp_path, words, pre_tokenizers.WhitespaceSplit()), "words")
    assert file_of(tokenizer, tmp_path, ["a a a a a"]).open().tolist() == [1, 0, 0, 0, 0, 0, 1]
    assert (tokenizer.end_of_text, tokenizer.vocabulary_size) == (1, 3)
    by_folder = load_tokenizer(str(tmp_path), 0, rows(), digest(rows(), tmp_path), tmp_path)
    assert by_folder.identity == tokenizer.identity


def test_what_is_wrong_with_a_tokenizer_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistyped path must not look like a name on the hub, nor end in a trace from a Rust library."""

    def message(name: str, vocabulary: int = 4096) -> str:
        with pytest.raises(UserError) as caught:
            load_tokenizer(name, vocabulary, rows(), TextDigest("", 1, 1, 1), tmp_path)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    (tmp_path / "bad.json").write_text('{"version": "1.0"}')
    assert f"data.tokenizer: {tmp_path}/none.json is not there; give" in message(f"{tmp_path}/none.json")
    assert f"data.tokenizer: {tmp_path}/tokenizer.json is not there" in message(str(tmp_path))
    assert f"data.tokenizer: {tmp_path}/bad.json is not a tokenizer.json" in message(f"{tmp_path}/bad.json")
    assert "data.vocabulary must be at least 257 for tokenizer bpe" in message("bpe", 256)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", _no_route)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    assert "data.tokenizer: the Hugging Face hub is out of reach and gpt2 is not in the local" in message("gpt2")
    monkeypatch.undo()
    assert "data.tokenizer: b p e is neither a tokenizer.json here nor on the Hugging Face hub" in message("b p e")


def _no_route(*_: object, **__: object) -> None:
    raise ConnectionError("no route to host")


def test_a_hub_tokenizer_comes_from_the_local_cache_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compute nodes often have the hub's cache but no network."""
    file = bpe(tmp_path).file
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", _no_route)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, _: file if name == "gpt2" else None)
    found = load_tokenizer("gpt2", 0, rows(), digest(rows(), tmp_path), tmp_path)
    assert found.identity == bpe(tmp_path).identity


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A full disk or a read-only home is the user's to put right."""
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"data.cache: .*/file/tokens/\w+ cannot be written: Not a directory; give"):
        file_of(ByteTokenizer(), tmp_path / "file")


def test_no_warning_where_a_process_forks_after_tokenising(tmp_path: Path) -> None:
    """Data loader workers are forked; older tokenizers print a warning of three lines for each of them."""
    script = (
        SCRIPT
        + "import os\n"
        + "assert os.environ['TOKENIZERS_PARALLELISM'] == 'false'\n"  # what the warning depends on
        + "pid = os.fork()\n"
        + "if pid == 0:\n    load_tokenizer('bpe', 400, rows, text, root).encode(['forked'] * 50)\n    os._exit(0)\n"
        + "os.waitpid(pid, 0)\n"
    )
    here = str(Path(tokens_module.__file__).parent)
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    command = [sys.executable, "-W", "ignore", "-c", script, here, str(tmp_path), __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""


def test_a_large_data_set_is_hashed_once(tmp_path: Path) -> None:
    """Reading all of OpenWebText to know it again took minutes at each start."""

    class Known(MemoryRows):
        def known_as(self) -> str | None:
            return "fingerprint"

    first = digest(Known(TEXTS, ""), tmp_path)
    assert first == digest(rows(), tmp_path)
    assert digest(Known(["not read"], ""), tmp_path) == first


def test_keys_differ_where_any_part_does() -> None:
    """Parts that run together would give two things one key."""
    keys = {key_of(a="1", b=2), key_of(a="1", b=3), key_of(a="12", b=2), key_of(a="1", b="2"), key_of(a="1", c=2)}
    assert len(keys) == 5
    assert key_of(b=2, a="1") in keys


def test_rows_can_be_cut_and_read_again(tmp_path: Path) -> None:
    """A text is read three times (hashed, trained on, tokenised); each must see the same."""

    def check(whole: Rows) -> None:
        assert list(whole) == list(whole) == ["a\r\n", "b", ""]
        assert list(whole.part(1, 3)) == ["b", ""]

    for name, text in (("0", b"a\r\n"), ("1", b"b"), ("2", b"")):
        (tmp_path / name).write_bytes(text)
    check(FileRows([tmp_path / name for name in "012"], ""))
    check(rows(["a\r\n", "b", ""]))


def test_text_without_a_character_is_refused(tmp_path: Path) -> None:
    """The wrong column is often an empty one; its tokens would be ends of text alone."""
    for texts in ([], ["", ""]):
        for part in hold_out(rows(texts), 0.1):
            with pytest.raises(UserError, match="data.path: memory is empty throughout: no text in . rows; give"):
                digest(part, tmp_path)
