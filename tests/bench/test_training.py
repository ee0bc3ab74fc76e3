"""The benchmarks of trainings: rows as documented, every arm measured, and nothing attributed that is not spent."""

from __future__ import annotations

from pathlib import Path

import pytest

from geocont.bench.callbacks import measure_callbacks
from geocont.bench.training import measure_training
from geocont.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore")
COLUMNS = {"name", "ranks", "every_n_steps", "ms_per_step", "overhead_percent"}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEOCONT_CACHE", str(tmp_path))


def test_callbacks_of_the_mlp_are_measured() -> None:
    """Protects the rows, and the share of the callbacks: most where all fire at each step."""
    rows = measure_callbacks("mlp", [1], steps=6, repeats=1)
    assert all(COLUMNS | {"inside_percent", "peak_mb"} == set(row) for row in rows)
    shares = {row["name"]: row["inside_percent"] for row in rows}
    assert shares["light_every_step"] > shares["only_summing_gradients"] > shares["none"] == shares["none/logging"]


def test_the_cost_of_an_arm_is_divided_among_its_switches_and_logging() -> None:
    """Protects the table of what each toggle costs: parts add up, and nothing counts for two of them."""
    rows = measure_callbacks("gpt2", [1], steps=3, repeats=1)
    arm = {row["name"]: row for row in rows if row["name"].startswith("every_step")}
    whole, parts = arm.pop("every_step"), arm
    assert {name.removeprefix("every_step/") for name in parts} == {
        *("gradient_coherence", "weight_continuity", "spectral_dynamics", "optimizer_monitor"),
        *("softmax_saturation", "stability_guard", "logging"),
    }
    assert all(row["inside_percent"] > 0 for row in parts.values())
    assert sum(row["inside_percent"] for row in parts.values()) == pytest.approx(whole["inside_percent"])
    assert sum(row["ms_per_step"] for row in parts.values()) < whole["ms_per_step"]


def test_callbacks_of_gpt2_are_measured_on_two_ranks() -> None:
    """Protects the measurement where processes share the work: it comes back from rank 0 of each arm."""
    rows = [row for row in measure_callbacks("gpt2", [2], steps=3, repeats=1) if "/" not in row["name"]]
    assert [row["name"] for row in rows] == ["none", "default_cadence", "every_step"]
    assert all(row["ranks"] == 2 and row["ms_per_step"] > 0 for row in rows)
    assert rows[0]["inside_percent"] == 0 < rows[2]["inside_percent"]


def test_a_plain_loop_and_lightning_are_measured() -> None:
    """Protects the comparison: three arms that train, the plain loop being the measure."""
    rows = measure_training(steps=2, repeats=1)
    assert [row["name"] for row in rows] == ["plain", "lightning", "geocont"]
    assert all(set(row) == COLUMNS and row["ms_per_step"] > 0 for row in rows)
    assert rows[0]["overhead_percent"] == 0


def test_what_cannot_be_measured_is_said() -> None:
    """Protects from a division by zero after a minute."""
    with pytest.raises(UserError, match="--model must be one of mlp, gpt2, got 'bert'"):
        measure_callbacks("bert", [1], None, 1)
    with pytest.raises(UserError, match="--ranks must be at least 1, got 0"):
        measure_callbacks("mlp", [0], None, 1)
    with pytest.raises(UserError, match="--steps must be at least 1, got 0"):
        measure_training(0, 1)
