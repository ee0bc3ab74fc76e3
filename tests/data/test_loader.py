"""The order of training samples: one order for any number of ranks, and resumption on the very next sample."""

from __future__ import annotations

import pytest
import torch

from geocont.data.loader import EpochOrder, ResumableLoader, TensorPairs
from geocont.errors import UserError


def dataset(samples: int = 23) -> TensorPairs:
    return TensorPairs(torch.arange(samples, dtype=torch.float32), torch.arange(samples))


def ids(loader: ResumableLoader) -> list[int]:
    return [int(i) for batch in loader for i in batch[1]]


def order_of_rank(rank: int, world: int, samples: int = 24, epoch: int = 3) -> list[int]:
    order = EpochOrder(dataset(samples), seed=5)
    order.rank, order.num_replicas = rank, world
    order.total_size = samples // world * world
    order.set_epoch(epoch)
    return list(order)


def test_epochs_are_permutations_that_depend_on_seed_and_epoch_only() -> None:
    loader = ResumableLoader(dataset(), 4, seed=7)
    first = ids(loader)
    torch.manual_seed(99)
    assert ids(ResumableLoader(dataset(), 4, seed=7)) == first
    assert len(set(first)) == 20  # five batches, the last incomplete one dropped
    loader.order.set_epoch(1)
    assert ids(loader) != first
    assert ids(ResumableLoader(dataset(), 4, seed=8)) != first


@pytest.mark.parametrize("workers", [0, 2])
def test_resumes_on_the_next_sample_even_where_workers_ran_ahead(workers: int) -> None:
    """Resuming in mid-epoch once replayed the epoch from its first batch."""
    whole = ids(ResumableLoader(dataset(), 4, seed=7))
    loader = ResumableLoader(dataset(), 4, seed=7, num_workers=workers)
    iterator = iter(loader)
    seen = [int(i) for _ in range(2) for i in next(iterator)[1]]
    state = loader.state_dict()
    assert state == {"epoch": 0, "position": 8}
    other = ResumableLoader(dataset(), 4, seed=7, num_workers=workers)
    other.load_state_dict(state)
    assert seen + ids(other) == whole
    other.order.set_epoch(1)
    assert len(ids(other)) == 20  # only the saved epoch starts in its middle


def test_ranks_share_an_epoch_without_overlap_and_positions_do_not_depend_on_their_number() -> None:
    alone = order_of_rank(0, 1)
    for world in (2, 3, 4):
        ranks = [order_of_rank(rank, world) for rank in range(world)]
        assert len({len(rank) for rank in ranks}) == 1
        dealt = [ranks[p % world][p // world] for p in range(24)]
        assert dealt == alone


def test_iterating_leaves_the_global_random_state_alone() -> None:
    loader = ResumableLoader(dataset(), 4, seed=7)
    before = torch.get_rng_state()
    ids(loader)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_batch_larger_than_the_data_is_named() -> None:
    with pytest.raises(UserError, match="data.batch_size must be from 1 to 23 for 23 training samples, got 24"):
        ResumableLoader(dataset(), 24, seed=0)
    with pytest.raises(UserError, match="got 0"):
        ResumableLoader(dataset(), 0, seed=0)
