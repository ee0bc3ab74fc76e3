"""The local store: one row a step, arrays, and what a kill or a resumption leaves."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from geocont.runs.store import RunStore, read_arrays, read_metrics


def test_staged_values_and_losses_of_a_step_are_one_row(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store.stage({"weight/v1/hidden": 0.5, "picture": object()}, step=0)
    store.log_metrics({"train/loss": torch.tensor(2.0)}, step=0)
    store.stage({"weight/v1/hidden": 0.6}, step=1)
    store.commit_staged(1)
    store.commit_staged(1)
    store.log_metrics({"train/loss": math.nan}, step=2)
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 3
    assert read_metrics(tmp_path) == [  # readable while the run goes on
        {"step": 0, "weight/v1/hidden": 0.5, "train/loss": 2.0},
        {"step": 1, "weight/v1/hidden": 0.6},
        {"step": 2, "train/loss": None},  # a diverged loss stays visible
    ]
    store.log_metrics({"val/loss": 1.0}, step=2)
    assert read_metrics(tmp_path)[-1] == {"step": 2, "train/loss": None, "val/loss": 1.0}


def test_arrays_come_back_with_their_shape_while_the_run_goes_on(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    vectors = torch.randn(3, 5)
    store.log_arrays({"weight/v1/hidden": torch.tensor([0.5, math.nan]), "weight/v1_vector/hidden": vectors}, step=0)
    store.log_arrays({"weight/v1/hidden": torch.tensor([0.7, 0.8], dtype=torch.bfloat16)}, step=50)
    found = read_arrays(tmp_path, "weight/v1/hidden")
    assert list(found) == [0, 50]
    assert math.isnan(found[0][1])
    assert torch.equal(torch.tensor(read_arrays(tmp_path, "weight/v1_vector/hidden")[0]), vectors)
    assert read_arrays(tmp_path, "weight/u1/hidden") == {}
    store.finalize("success")
    assert len(read_arrays(tmp_path, "weight/v1/hidden")) == 2


def test_a_resumed_run_supersedes_what_was_written_beyond_its_checkpoint(tmp_path: Path) -> None:
    """A killed run has rows beyond its last checkpoint: after the resumption every step stood there twice."""
    first = RunStore(tmp_path)
    for step in range(5):
        first.log_metrics({"a": 1.0}, step=step)
        first.log_arrays({"x": torch.tensor([1.0])}, step=step)
    second = RunStore(tmp_path, resumed_at=3)
    for step in range(3, 7):
        second.log_metrics({"a": 2.0}, step=step)
        second.log_arrays({"x": torch.tensor([2.0])}, step=step)
    second.finalize("success")
    second.log_metrics({"a": 2.0}, step=7)  # finalised loggers go on: a second trainer function uses them
    assert [row["a"] for row in read_metrics(tmp_path)] == [1, 1, 1, 2, 2, 2, 2, 2]
    assert [array[0] for array in read_arrays(tmp_path, "x").values()] == [1, 1, 1, 2, 2, 2, 2]


def test_files_cut_short_by_a_kill_are_read_up_to_there_and_can_go_on(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    for step in range(3):
        store.log_metrics({"a": 1.0}, step=step)
        store.log_arrays({"x": torch.ones(100)}, step=step)
    metrics, part = tmp_path / "metrics.jsonl", tmp_path / "arrays/part-000.arrow"
    metrics.write_bytes(metrics.read_bytes()[:-5])
    whole = part.read_bytes()
    for size in (0, 3, 100, len(whole) - 200, len(whole) - 1):
        part.write_bytes(whole[:size])
        assert len(read_arrays(tmp_path, "x")) <= 3
    assert len(read_metrics(tmp_path)) == 2
    again = RunStore(tmp_path, resumed_at=2)
    again.log_metrics({"a": 2.0}, step=2)
    assert [row["a"] for row in read_metrics(tmp_path)] == [1, 1, 2]


def test_a_folder_without_a_run_is_empty(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []
    assert read_arrays(tmp_path, "x") == {}
