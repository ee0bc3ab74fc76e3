"""Digits and MNIST: schema, standardisation, fingerprints, and what is said where data is missing."""

from __future__ import annotations

import io
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from geocont.data import MNIST, Digits
from geocont.errors import UserError


def write_mnist(folder: Path, split: str, pixels: np.ndarray, labels: list[int], column: str = "image") -> None:
    """Writes images in the schema of ylecun/mnist on the hub: PNG bytes and a label."""
    rows = []
    for image in pixels:
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, format="PNG")
        rows.append({"bytes": buffer.getvalue(), "path": None})
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table({column: rows, "label": labels}), folder / f"{split}-00000-of-00001.parquet")


@pytest.fixture
def mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    generator = np.random.default_rng(0)
    for split, count in (("train", 30), ("test", 12)):
        pixels = generator.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        write_mnist(tmp_path / "mnist", split, pixels, [i % 10 for i in range(count)])
    return tmp_path / "mnist"


def test_digits_are_split_once_and_standardised_by_the_training_pixels() -> None:
    train, held_out = Digits().splits
    assert (len(train.x), len(held_out.x)) == (1437, 360)
    assert train.x.mean().item() == pytest.approx(0, abs=1e-6)
    assert train.x.std().item() == pytest.approx(1, abs=1e-4)
    assert held_out.y.bincount().min() >= 34
    assert Digits().fingerprint() == Digits(batch_size=3).fingerprint()


def test_mnist_is_read_from_a_folder_in_the_schema_of_the_hub(mnist: Path) -> None:
    data = MNIST(str(mnist), batch_size=5)
    train, test = data.splits
    pixels = np.random.default_rng(0).integers(0, 256, (30, 28, 28), dtype=np.uint8)
    expected = (torch.tensor(pixels.reshape(30, -1)).float() / 255 - 0.1307) / 0.3081
    assert torch.allclose(train.x, expected, atol=1e-6)
    assert train.y.tolist() == [i % 10 for i in range(30)]
    assert len(test.x) == 12
    assert len(list(data.train_dataloader())) == 6
    assert next(iter(data.val_dataloader()))[0].shape == (12, 784)


def test_fingerprint_follows_the_content(mnist: Path, tmp_path: Path) -> None:
    before = MNIST(str(mnist)).fingerprint()
    assert MNIST(str(mnist)).fingerprint() == before
    write_mnist(mnist, "test", np.zeros((12, 28, 28), np.uint8), [0] * 12)
    assert MNIST(str(mnist)).fingerprint() != before


def test_what_is_wrong_with_the_data_is_said_in_one_line(mnist: Path, tmp_path: Path) -> None:
    def message(path: Path | str) -> str:
        with pytest.raises(UserError) as caught:
            MNIST(str(path)).setup("fit")
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "is not a folder; it must hold train*.parquet and test*.parquet" in message(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "has no train*.parquet and no test*.parquet" in message(tmp_path / "empty")
    write_mnist(tmp_path / "other", "train", np.zeros((2, 28, 28), np.uint8), [0, 1], column="img")
    write_mnist(tmp_path / "other", "test", np.zeros((2, 28, 28), np.uint8), [0, 1], column="img")
    assert "must have columns image and label, has ['img', 'label']" in message(tmp_path / "other")
    write_mnist(tmp_path / "size", "train", np.zeros((2, 30, 30), np.uint8), [0, 1])
    write_mnist(tmp_path / "size", "test", np.zeros((2, 30, 30), np.uint8), [0, 1])
    assert "must be 28 x 28, got 900 pixels" in message(tmp_path / "size")
    (mnist / "train-00000-of-00001.parquet").write_bytes(b"PAR1 but no more")
    assert "cannot be read" in message(mnist)


def test_a_missing_network_is_said_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a network, a name on the hub once meant half a minute of retries and a long stack trace."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", _refuse)
    started = time.monotonic()
    with pytest.raises(UserError, match="hub is out of reach and someone/mnist is not in the local cache; connect, or"):
        MNIST("someone/mnist").setup("fit")
    assert time.monotonic() - started < 20


def _refuse(*_: object, **__: object) -> None:
    raise ConnectionError("no route to host")
