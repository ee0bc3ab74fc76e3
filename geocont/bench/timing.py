"""Interleaved timing: on a shared machine only ratios within one round mean anything."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any


def interleave(arms: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Returns the seconds that each arm took in each round, one round after the other."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(repeats):
        for name, arm in arms.items():
            started = time.perf_counter()
            arm()
            seconds[name].append(time.perf_counter() - started)
    return seconds


def median_ratio(a: list[float], b: list[float]) -> float:
    """Returns the median over rounds of a / b."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))
