"""The experiment over assignments: what it trains, and what it reads from the runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from geocont.experiments import manifolds
from geocont.experiments.runner import Runner

TINY = [
    *("--model.network.width=32", "--model.network.context=32", "--data.context=32", "--data.batch_size=4"),
    *("--trainer.max_steps=4", "--trainer.val_check_interval=4", "--trainer.limit_val_batches=2"),
    *("--callbacks.optimizer_monitor.every_n_steps=1", "--logger.wandb=null", "--data.path=stdlib"),
]


@pytest.mark.parametrize("variant", manifolds.VARIANTS)
def test_every_variant_is_a_configuration(variant: str, geocont: Callable[..., tuple[int, str, str]]) -> None:
    """Protects long runs: each variant has valid arguments, and asks for the constraint and solver of its name."""
    job = manifolds.jobs("cpu", None, [variant], 1)[0]
    status, out, err = geocont("fit", *job.arguments, "--print_config")
    assert status == 0, err
    assert f"assignment: {variant.removesuffix('_dual_ascent')}\n" in out
    assert f"solver: {'dual_ascent' if variant.endswith('dual_ascent') else 'reweighted'}\n" in out


def test_a_run_becomes_a_row_a_table_and_a_figure(geocont: Callable[..., tuple[int, str, str]], folder: Path) -> None:
    """Protects the table: every column is read from what the callbacks logged, under the keys they log it."""
    jobs = manifolds.jobs("cpu", None, ["hetero"], 1)
    runner = Runner(folder / "out", manifolds.plan("cpu", None), jobs)
    run_dir = runner.folder(jobs[0])
    status, out, err = geocont("fit", *jobs[0].arguments, *TINY, "--run.dir", str(run_dir))
    assert status == 0, out + err
    with Console(file=(folder / "log").open("w")) as console:
        rows = manifolds.report(runner, console)
    assert [row["status"] for row in rows] == ["finished"]
    missing = [key for key, value in rows[0].items() if value is None]
    assert missing == ["guard_first_step", "guard"]  # nothing to report
    assert rows[0]["sigma_max_q"] == pytest.approx(1.0, abs=1e-5)
    assert 0.5 < rows[0]["certified_ratio_mlp"] <= 1.01
    assert (folder / "out/manifolds.png").stat().st_size > 10_000
    assert "| hetero  | 1 " in (folder / "out/table.md").read_text()
