"""Evaluation on WikiText's articles and on several ranks: what is counted, and that it is counted once."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from geocont.data import Digits, Text
from geocont.data.images import Split
from geocont.data.loader import EveryOnce
from geocont.models import LlamaConfig, ResidualMLPConfig
from geocont.modules import LlamaModule, ResidualMLPModule

WIKITEXT = Path(__file__).parents[2].parent / "shared/data/wikitext"
pytestmark = pytest.mark.filterwarnings("ignore:::lightning", "ignore:.*treespec:FutureWarning")


@pytest.fixture(autouse=True)
def _caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEOCONT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")


def words_as_tokens(path: Path, rows: list[str]) -> Path:
    """Writes a tokenizer of whole words, as WikiText's perplexities are defined by."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"<eos>": 0, "<unk>": 1}
    for row in rows:
        for word in row.split():
            vocabulary.setdefault(word, len(vocabulary))
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(path))
    return path


@pytest.mark.skipif(not WIKITEXT.is_dir(), reason="shared/data/wikitext is not here")
@pytest.mark.parametrize(("split", "count"), [("validation", 217_646), ("test", 245_569)])
def test_wikitext_has_its_published_number_of_tokens(split: str, count: int, tmp_path: Path) -> None:
    """Perplexities compare only over the same tokens: an end for every row, also an empty one, the first scored."""
    rows = pq.read_table(WIKITEXT / f"{split}.parquet")["text"].to_pylist()
    pq.write_table(pa.table({"text": rows}), tmp_path / f"{split}.parquet")
    pq.write_table(pa.table({"text": rows[:400]}), tmp_path / "train.parquet")
    tokenizer = words_as_tokens(tmp_path / "tokenizer.json", rows)
    data = Text(str(tmp_path), tokenizer=str(tokenizer), context=256, batch_size=64)
    data.setup("test")
    loader = data.val_dataloader() if split == "validation" else data.test_dataloader()
    assert sum(int((y != -100).sum()) for _, y in loader) == count
    assert data.tokens_per_word(split) == 1.0


class Pieces(Callback):
    """Writes what a rank sees and logs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        (self.folder / f"{trainer.world_size}-{trainer.global_rank}.json").write_text(json.dumps(metrics))


def validated(folder: Path, ranks: int, model: LightningModule, data: Any) -> list[dict[str, float]]:
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    several = {"strategy": "ddp_fork", "devices": 2} if ranks == 2 else {"devices": 1}
    trainer = Trainer(accelerator="cpu", callbacks=[Pieces(folder)], enable_model_summary=False, **quiet, **several)
    trainer.validate(model, datamodule=data, verbose=False)
    return [json.loads((folder / f"{ranks}-{rank}.json").read_text()) for rank in range(ranks)]


def test_two_ranks_score_every_token_once(tmp_path: Path) -> None:
    """Torch's sampler repeats blocks until ranks have equally many, and those would count twice."""
    (tmp_path / "text").mkdir()
    rows = [f"word {i} and others" for i in range(30)]
    for split, part in (("train", rows), ("validation", rows[:11])):
        pq.write_table(pa.table({"text": part}), tmp_path / f"text/{split}.parquet")
    data = Text(str(tmp_path / "text"), tokenizer="bytes", context=16, batch_size=4)
    torch.manual_seed(0)
    model = LlamaModule(LlamaConfig(layers=1, heads=2, width=8, hidden=8, context=16, vocabulary=257))
    (alone,) = validated(tmp_path, 1, model, data)
    blocks = math.ceil((data.tokens("validation").tokens - 1) / 16)
    assert blocks % 2 == 1  # one rank is a block short
    assert alone["val/tokens"] == data.tokens("validation").tokens - 1
    per_word = math.log(alone["val/perplexity_per_word"]) * sum(len(row.split()) + 1 for row in rows[:11])
    assert per_word == pytest.approx(alone["val/loss"] * alone["val/tokens"], rel=1e-5)
    for rank in validated(tmp_path, 2, model, data):
        assert rank["val/tokens"] == alone["val/tokens"]
        assert rank["val/loss"] == pytest.approx(alone["val/loss"], rel=1e-6)


def test_two_ranks_classify_every_sample_once(tmp_path: Path) -> None:
    """The same for images: accuracy and loss are those of one process, whatever the number of ranks."""
    x, y = torch.randn(201, 64), torch.randint(10, (201,))
    split = Split(x, y)
    data = type("Few", (Digits,), {"load": lambda _: (split, split)})()
    torch.manual_seed(0)
    model = ResidualMLPModule(ResidualMLPConfig(depth=1, width=16))
    (alone,) = validated(tmp_path, 1, model, data)
    exact = torch.nn.functional.cross_entropy(model(x), y).item()
    assert alone["val/loss"] == pytest.approx(exact, rel=1e-5)
    for rank in validated(tmp_path, 2, model, data):
        assert rank == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize("samples", [1, 5, 6])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_have_equally_many_samples_and_each_once(samples: int, ranks: int) -> None:
    """A rank with fewer batches than the others would leave them waiting in a collective."""
    parts = []
    for rank in range(ranks):
        order = EveryOnce(range(samples))  # type: ignore[arg-type]
        order.num_replicas, order.rank = ranks, rank
        order.num_samples = math.ceil(samples / ranks)
        order.total_size = order.num_samples * ranks
        parts.append(list(order))
    assert len({len(part) for part in parts}) == 1
    assert sorted(i for part in parts for i in part if i < samples) == list(range(samples))
