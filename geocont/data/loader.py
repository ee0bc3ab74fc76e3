"""A DataLoader whose position is a global sample index, so that a run resumes in mid-epoch on the very next sample."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from geocont.errors import UserError

UNSCORED = -100  # the target that torch's cross entropy ignores


class TensorPairs(Dataset):
    """Inputs and labels in memory, fetched a batch at a time (one gather instead of a collation of single samples)."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Returns samples and their labels; an index beyond the last is a sample that does not count, label -100."""
        places = torch.tensor(indices)
        beyond = places >= len(self.x)
        places[beyond] = 0
        return self.x[places], self.y[places].masked_fill(beyond, UNSCORED)


def as_fetched(batch: Any) -> Any:
    """Collates nothing: the data set has returned a whole batch."""
    return batch


class EpochOrder(DistributedSampler):
    """The order of an epoch: a permutation that depends on seed and epoch only, dealt out to the ranks in turn.

    Position p of an epoch is the same sample whatever the number of ranks: rank r of n takes positions r, r + n ...
    Lightning recognises it as a distributed sampler and calls ``set_epoch``.

    Args:
        dataset: What is sampled.
        seed: Of the permutation, together with the epoch.
    """

    def __init__(self, dataset: Dataset, seed: int) -> None:
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        world = torch.distributed.get_world_size() if distributed else 1
        rank = torch.distributed.get_rank() if distributed else 0
        super().__init__(dataset, num_replicas=world, rank=rank, shuffle=True, seed=seed, drop_last=True)
        self.resume_at: tuple[int, int] = (-1, 0)  # (epoch, position) that a checkpoint brought

    def first_position(self) -> int:
        """Returns the position at which the current epoch starts: 0, or where a checkpoint left it."""
        epoch, position = self.resume_at
        return position if epoch == self.epoch else 0

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.dataset), generator=generator)  # type: ignore[arg-type]
        return iter(order[self.first_position() + self.rank : self.total_size : self.num_replicas].tolist())


class ResumableLoader(DataLoader):
    """Shuffled batches of one size; its state is the epoch and the number of samples taken from it by all ranks.

    The last incomplete batch of an epoch is dropped, so every rank has as many batches as the others.

    Args:
        dataset: A data set, whose ``__getitems__`` returns a collated batch.
        batch_size: Samples a batch, on each rank.
        seed: Of the order, together with the epoch.
        num_workers: Loader processes; 0 loads in the training process.

    Raises:
        UserError: The data set does not fill one batch on every rank.
    """

    def __init__(self, dataset: Dataset, batch_size: int, seed: int, num_workers: int = 0) -> None:
        self.order = EpochOrder(dataset, seed)
        self._samples_per_batch = batch_size * self.order.num_replicas
        samples = len(dataset)  # type: ignore[arg-type]
        largest = samples // self.order.num_replicas
        if not 1 <= batch_size <= largest:
            raise UserError(
                f"data.batch_size must be from 1 to {largest} for {samples} training samples, got {batch_size}"
            )
        self._position = 0
        super().__init__(
            dataset,
            batch_size=batch_size,
            sampler=self.order,
            drop_last=True,
            num_workers=num_workers,
            collate_fn=as_fetched,
            persistent_workers=num_workers > 0,
            generator=torch.Generator().manual_seed(seed),  # of the workers; the global state is training's own
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._position = self.order.first_position()
        for batch in super().__iter__():
            self._position += self._samples_per_batch  # counted where batches are used: workers run ahead
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Returns the epoch and the position in it, in samples of all ranks; Lightning puts it into checkpoints."""
        return {"epoch": self.order.epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Has the saved epoch go on at the saved position."""
        self.order.resume_at = (state["epoch"], state["position"])


class EveryOnce(DistributedSampler):
    """All samples in order, dealt out to the ranks in turn, each exactly once.

    Torch's own sampler repeats samples until all ranks have as many, and those would count twice. Here a rank that is
    one short gets an index beyond the last, for which a data set returns a sample that is not scored.
    """

    def __init__(self, dataset: Dataset) -> None:
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        world = torch.distributed.get_world_size() if distributed else 1
        super().__init__(dataset, world, torch.distributed.get_rank() if distributed else 0, shuffle=False)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, self.total_size, self.num_replicas))


def evaluation_loader(dataset: Dataset, batch_size: int) -> DataLoader:
    """Returns a loader of every sample once, over all ranks; see :class:`EveryOnce`.

    Args:
        dataset: Its ``__getitems__`` returns a collated batch, and takes indices beyond the last.
        batch_size: Samples a batch, on each rank.
    """
    generator = torch.Generator()  # unused, but without one a loader draws from training's random state
    return DataLoader(
        dataset, batch_size=batch_size, sampler=EveryOnce(dataset), collate_fn=as_fetched, generator=generator
    )
