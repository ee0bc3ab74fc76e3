"""The optimizer benchmark: its rows, and that what it reports is true."""

from __future__ import annotations

import pytest

from geocont.bench import optimizer as bench
from geocont.errors import UserError
from geocont.models import GPT2Config

KEYS = {
    *("name", "gradients", "manifold", "shape", "ms_per_step", "peak_mb", "gflop"),
    *("tangent_residual", "certified_ratio", "manifold_residual"),
}


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    config = GPT2Config(layers=2, heads=2, width=16, context=16, vocabulary=257, bias=False)
    monkeypatch.setattr(bench, "SMALL", config)
    monkeypatch.setattr(bench, "TRAINING_STEPS", 2)
    return bench.measure_optimizers(small=True, repeats=1, gradients=["real", "power"])


def test_rows_hold_what_they_promise(rows: list[dict[str, object]]) -> None:
    """Protects the figures that are quoted: every optimizer on every matrix, ratios of an optimum, and one total."""
    assert all(row.keys() == KEYS for row in rows)
    matrices = [row for row in rows if row["shape"] != "total"]
    assert len(matrices) == len(bench.ARMS) * 2 * 2 * 4
    solved = [row for row in matrices if row["certified_ratio"] is not None]
    assert {row["name"] for row in solved} == {"dual_ascent", "dual_ascent_float32", "projected", "reweighted"}
    assert all(-1 <= row["certified_ratio"] <= 1 + 1e-6 for row in solved)
    ours = [row for row in solved if row["name"] == "reweighted"]
    assert all(row["certified_ratio"] > 0.9 and row["tangent_residual"] < 1e-5 for row in ours)
    totals = {row["name"]: row for row in rows if row["shape"] == "total"}
    assert totals.keys() == bench.ARMS.keys()
    assert totals["reweighted"]["certified_ratio"] == min(row["certified_ratio"] for row in ours)
    assert totals["adamw"]["gflop"] == 0 < totals["muon"]["gflop"] < totals["dual_ascent"]["gflop"]


def test_unknown_names_are_refused_in_one_line() -> None:
    """Protects hours: a misspelt optimizer or spectrum is named before anything is measured."""
    with pytest.raises(UserError, match="'adam' is none of adamw"):
        bench.measure_optimizers(small=True, repeats=1, names=["adam"])
    with pytest.raises(UserError, match="'flat' is none of real"):
        bench.measure_optimizers(small=True, repeats=1, gradients=["flat"])
