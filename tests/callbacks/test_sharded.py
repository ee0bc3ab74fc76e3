"""Measuring in shards: ranks together say what one says, and whatever happens on one of them hangs no other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from callbacks.shards import Shards, deal, sharing_parameters
from geocont.runs.store import read_arrays, read_metrics
from geocont.weights import Matrix, WeightMap
from tests.callbacks.ranks import run

TIMES, LOSSES = ("measure/milliseconds", "throughput"), ("train/", "val/")


def left(folder: Path, rank: int) -> dict:
    return torch.load(folder / f"rank-{rank}.pt", weights_only=True)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 30])
def test_work_is_dealt_once_and_evenly(ranks: int) -> None:
    costs = {("gradient", str(i)): float(1 + i % 5) for i in range(20)}
    owners = deal(costs, ranks)
    assert owners.keys() == costs.keys()
    assert owners == deal(dict(costs), ranks)
    loads = [sum(costs[unit] for unit, owner in owners.items() if owner == rank) for rank in range(ranks)]
    assert max(loads) <= 4 / 3 * max(sum(loads) / ranks, max(costs.values()))


def test_projections_of_one_parameter_stay_together() -> None:
    def matrix(projection: str, parameter: str) -> Matrix:
        return Matrix(parameter, projection, 0, "attention", "reads")

    fused = [matrix("q", "a"), matrix("k", "b"), matrix("v", "a"), matrix("o", "c"), matrix("p", "b")]
    assert sharing_parameters(WeightMap(fused)) == {"q": "q", "k": "k", "v": "q", "o": "o", "p": "k"}


def test_one_rank_calls_nothing_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("all_gather_object", "send_object_list", "recv_object_list"):
        monkeypatch.setattr(f"torch.distributed.{name}", None)
    shards, tensor = Shards.current(), torch.ones(1)
    assert shards == Shards(0, 1)
    assert shards.gather("x") == ["x"]
    assert shards.bring({"a": tensor}, {"a": 0})["a"] is tensor


TROUBLE = {"nan_q": {"bad": "q"}, "nan_down": {"bad": "down"}, "fail_0": {"fail_rank": 0}, "fail_1": {"fail_rank": 1}}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("ranks")
    trouble = {name: {"ranks": 2, "steps": 2, **options} for name, options in TROUBLE.items()}
    status, said = run(folder, one={"ranks": 1, "steps": 3}, two={"ranks": 2, "steps": 3, "validate": 1}, **trouble)
    assert status == 0, said
    return folder, said


def metrics_of(folder: Path) -> list[dict]:
    """What the two ranks of a training could monitor of the callbacks; losses are the module's affair."""
    metrics = [left(folder, rank)["metrics"] for rank in (0, 1)]
    return [{key: float(value) for key, value in each.items() if not key.startswith(LOSSES)} for each in metrics]


@pytest.mark.slow
def test_ranks_know_the_same_and_keep_their_share(trained: tuple[Path, str]) -> None:
    """Monitors that differ between ranks make one of them stop or save alone, and the others wait for ever."""
    one, two = (trained[0] / name for name in ("one", "two"))
    metrics = metrics_of(two)
    assert metrics[0] == metrics[1]  # times as well
    assert {"guard/events", "throughput/samples_per_second", "measure/milliseconds"} <= metrics[0].keys()
    both = [left(two, rank)["owned"] for rank in (0, 1)]
    for kept in ("_cumulative", "_initial"):  # nothing is kept twice, and all is kept
        parts = [set(rank[kept]) for rank in both]
        assert all(parts)
        assert not parts[0] & parts[1]
        assert parts[0] | parts[1] == set(left(one, 0)["owned"][kept])
    assert (two / "checkpoints/healthy.ckpt").exists()


@pytest.mark.slow
def test_two_ranks_measure_like_one(trained: tuple[Path, str]) -> None:
    one, two = (trained[0] / name for name in ("one", "two"))
    alone, together = read_metrics(one), read_metrics(two)
    assert [row["step"] for row in alone] == [row["step"] for row in together] == [0, 1, 2, 3]
    assert {"weight/sigma2_in/q", "spectrum/sigma_max/o/layer_02", "softmax/logit_scale/mean"} <= together[0].keys()
    for step, (expected, found) in enumerate(zip(alone[:2], together[:2], strict=True)):
        assert expected.keys() == {key for key in found if not key.startswith("val/")}
        for key, value in expected.items():
            family, _, projection, *_ = (*key.split("/"), "", "", "")
            clear = expected.get(f"{family}/gap/{projection}", 2.0) >= 1.02
            # (The condition number of nearly singular weights tells the rounding of an update.)
            if clear and not key.startswith((*TIMES, *LOSSES, "spectrum/condition")):
                assert found[key] == pytest.approx(value, abs=1e-5), (step, key)
    for key in ("weight/v1/down", "gradient/singular_values/q", "softmax/max_logit/heads"):
        assert read_arrays(two, key)[0] == pytest.approx(read_arrays(one, key)[0], abs=1e-5), key


@pytest.mark.slow
@pytest.mark.parametrize("name", TROUBLE)
def test_a_rank_in_trouble_hangs_no_other(trained: tuple[Path, str], name: str) -> None:
    """A statistic without a value, or an exception, on the rank that measures it."""
    metrics = metrics_of(trained[0] / name)
    assert metrics[0] == metrics[1]
    if name.startswith("nan"):
        assert metrics[0]["measure/skipped"] > 0
        assert "weight/cosine/o" in metrics[0]
    else:  # said once for each training, by rank 0, wherever it was
        assert trained[1].count("WeightContinuity could not measure step 0: RuntimeError: no memory on this rank") == 2


@pytest.mark.slow
def test_sums_of_gradients_go_from_two_ranks_to_one_and_back(tmp_path: Path) -> None:
    status, said = run(
        tmp_path,
        whole={"ranks": 1, "steps": 6},
        first={"ranks": 2, "steps": 2},
        second={"ranks": 1, "steps": 4, "resume": "first"},
        third={"ranks": 2, "steps": 6, "resume": "second"},
    )
    assert status == 0, said
    states = []
    for name in ("whole", "third"):
        saved = torch.load(tmp_path / name / "checkpoints/last.ckpt", weights_only=True)["callbacks"]
        states.append(next(state for key, state in saved.items() if key.startswith("GradientCoherence")))
    for kept in ("initial", "cumulative"):
        assert states[0][kept].keys() == states[1][kept].keys()
        for name, value in states[0][kept].items():
            assert torch.allclose(value, states[1][kept][name], atol=1e-5), (kept, name)
    for family, starts in states[0]["starts"].items():
        assert starts.keys() == states[1]["starts"][family].keys()
    rows = [{row["step"]: row for row in read_metrics(tmp_path / name)} for name in ("whole", "third")]
    for key in ("cumulative/cosine/up", "update/relative_norm/q"):
        assert rows[0][5][key] == pytest.approx(rows[1][5][key], abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_others_with_an_error(tmp_path: Path, rank: int) -> None:
    status, _ = run(tmp_path, killed={"ranks": 2, "steps": 9, "kill_at": 2, "kill_rank": rank, "strategy": "ddp"})
    assert status != 0  # within a minute
    assert not (tmp_path / "killed/rank-0.pt").exists()
