"""What is printed at the end of a run: what changed most, where the run lies, how to look at it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from geocont.report.summary import changed_most, print_summary


def test_the_largest_change_comes_first_and_once_for_each_measure() -> None:
    """Whoever starts ten runs reads one line of each: it must not be filled by one thing under five names."""
    first = {"step": 0, "weight/v1/q": 0.05, "weight/v1/k": 0.05, "weight/u1/o": 0.1, "softmax/entropy/mean": 0.9}
    last = {"step": 9, "weight/v1/q": 0.6, "weight/v1/k": 0.4, "weight/u1/o": 0.11, "softmax/entropy/mean": None}
    scales = ("spectrum/sigma_max/q/layer_01", "softmax/max_logit/worst_head")
    rows = [
        first | dict.fromkeys(scales, 1.0),
        last | {scales[0]: 100.0, scales[1]: 0.0},
        {"step": 9, "train/loss": 1.0},
    ]
    found = changed_most(rows, 5)
    assert [(change.key, change.first, change.last) for change in found] == [
        (scales[0], 1.0, 100.0),
        ("weight/v1/q", 0.05, 0.6),
    ]
    assert changed_most([], 5) == []


def test_summary_says_where_and_how(trained: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(trained["mlp"])
    out = capsys.readouterr().out
    assert re.search(r"training loss +\S+ -> \S+", out)
    assert re.search(r"continuity of weights, v1 \(hidden\) +\S+ -> \S+ +\(chance 0.163\)", out)
    assert re.search(r"changed most:\n +\w+/\w+/\S+ +\S+ -> \S+\n", out)
    assert re.search(rf"report: \S*geocont report {trained['mlp']}\n", out)
    assert (trained["mlp"] / "plots/weight-v1-hidden.png").exists()
    print_summary(trained["gpt2"])
    assert re.search(r"continuity of weights, mean of 6 projections", capsys.readouterr().out)


def test_directions_that_are_none_do_not_count_as_changes() -> None:
    """An orthonormal matrix has no leading direction: its v1 jumps at random, and was what changed most."""
    first = {"weight/v1/q": 0.9, "weight/defined/q": 0.0, "weight/v1/k": 0.1, "weight/defined/k": 1.0}
    last = {"weight/v1/q": 0.01, "weight/defined/q": 0.0, "weight/v1/k": 0.3, "weight/defined/k": 0.3}
    assert [change.key for change in changed_most([first, last], 5)] == ["weight/v1/k"]
