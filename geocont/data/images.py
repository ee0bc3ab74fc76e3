"""Small image classification sets, held in memory: scikit-learn's digits, which need no network, and MNIST."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

from geocont.data.hub import load_splits
from geocont.data.loader import ResumableLoader, TensorPairs, evaluation_loader
from geocont.errors import UserError

EVALUATION_BATCH = 1024  # has no influence on any result


@dataclass(frozen=True)
class Split:
    """Standardised pixels ``(N, features)`` float32 and labels ``(N,)`` int64."""

    x: Tensor
    y: Tensor

    def fingerprint(self) -> str:
        """Returns a hash of pixels and labels."""
        digest = hashlib.sha256()
        for tensor in (self.x, self.y):
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()[:16]


class ImageClassification(LightningDataModule):
    """Base of in-memory image sets: resumable shuffled training batches, and a held-out split that only measures.

    ``validate`` and ``test`` use the same held-out split: nothing is selected on it.

    Args:
        batch_size: Training samples a step, on each rank.
        seed: Of the order of training samples (together with the epoch); by default that of ``seed_everything``.
        num_workers: Loader processes; 0, loading in the training process, is fastest for data in memory.
    """

    #: Number of input features and classes.
    inputs: int
    classes: int = 10

    def __init__(self, batch_size: int = 32, seed: int | None = None, num_workers: int = 0) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.seed = seed
        self.num_workers = num_workers
        self._splits: tuple[Split, Split] | None = None

    def load(self) -> tuple[Split, Split]:
        """Returns the training and the held-out split."""
        raise NotImplementedError

    @property
    def splits(self) -> tuple[Split, Split]:
        """The training and the held-out split, loaded when first asked for."""
        if self._splits is None:
            self._splits = self.load()
        return self._splits

    def setup(self, stage: str) -> None:
        """Loads the data, so that whatever is wrong with it is said before anything else starts."""
        _ = self.splits

    def fingerprint(self) -> str:
        """Returns a hash of the data as the model sees it."""
        return "-".join(split.fingerprint() for split in self.splits)

    def train_dataloader(self) -> DataLoader:
        """Shuffled batches; the last incomplete one of an epoch is dropped."""
        train = self.splits[0]
        return ResumableLoader(TensorPairs(train.x, train.y), self.batch_size, self._seed(), self.num_workers)

    def _seed(self) -> int:
        return int(os.environ.get("PL_GLOBAL_SEED", 0)) if self.seed is None else self.seed

    def val_dataloader(self) -> DataLoader:
        """The held-out split, in order."""
        held_out = self.splits[1]
        return evaluation_loader(TensorPairs(held_out.x, held_out.y), EVALUATION_BATCH)

    test_dataloader = val_dataloader
    predict_dataloader = val_dataloader


class Digits(ImageClassification):
    """scikit-learn's handwritten digits: 1,437 images of 8 x 8 to train on and 360 held out; no download.

    Pixels are standardised by the mean and deviation of all training pixels.
    """

    inputs = 64

    def load(self) -> tuple[Split, Split]:
        """Returns the splits, drawn once with a fixed seed and the same share of each digit."""
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        x, y = load_digits(return_X_y=True)
        x_train, x_test, y_train, y_test = train_test_split(x, y, test_size=360, random_state=0, stratify=y)
        mean, deviation = x_train.mean(), x_train.std()

        def split(x: np.ndarray, y: np.ndarray) -> Split:
            return Split(torch.tensor((x - mean) / deviation, dtype=torch.float32), torch.tensor(y, dtype=torch.int64))

        return split(x_train, y_train), split(x_test, y_test)


class MNIST(ImageClassification):
    """MNIST through Hugging Face ``datasets``; pixels are (x / 255 - 0.1307) / 0.3081.

    Args:
        path: Name on the Hugging Face hub, or a folder with ``train*.parquet`` and ``test*.parquet`` whose columns are
            ``image`` (PNG) and ``label``.
        batch_size: Training samples a step, on each rank.
        seed: Of the order of training samples (together with the epoch); by default that of ``seed_everything``.
        num_workers: Loader processes; 0, loading in the training process, is fastest for data in memory.
    """

    inputs = 784

    def __init__(
        self, path: str = "ylecun/mnist", batch_size: int = 32, seed: int | None = None, num_workers: int = 0
    ) -> None:
        super().__init__(batch_size, seed, num_workers)
        self.path = path

    def load(self) -> tuple[Split, Split]:
        """Returns the splits ``train`` and ``test``."""
        found = load_splits(self.path, ("train", "test"))
        train, test = (self._decode(split, found[split]) for split in ("train", "test"))
        return train, test

    def _decode(self, split: str, rows: Any) -> Split:
        columns = set(rows.column_names)
        if not {"image", "label"} <= columns:
            raise UserError(
                f"data.path: {self.path} ({split}) must have columns image and label, has {sorted(columns)}"
            )
        import datasets

        rows = rows.cast_column("image", datasets.Image(mode="L"))
        try:
            pixels = np.stack([np.asarray(image, dtype=np.uint8).reshape(-1) for image in rows["image"]])
        except Exception as error:
            raise UserError(f"data.path: {self.path} ({split}) has an image that cannot be decoded: {error}") from error
        if pixels.shape[1] != self.inputs:
            raise UserError(f"data.path: images of {self.path} must be 28 x 28, got {pixels.shape[1]} pixels")
        labels = torch.tensor(rows["label"], dtype=torch.int64)
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < self.classes:
            raise UserError(f"data.path: labels of {self.path} ({split}) must be 0 to {self.classes - 1}")
        return Split((torch.from_numpy(pixels).float() / 255 - 0.1307) / 0.3081, labels)
