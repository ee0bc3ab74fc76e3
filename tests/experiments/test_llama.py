"""The experiment over Llama's ablations: what it trains, what it reads from the runs, and how it decides."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console

from geocont.experiments import llama
from geocont.experiments.results import separates
from geocont.experiments.runner import Runner
from geocont.measures.continuity import chance, chance_deviation

TINY = [
    *("--model.network.layers=3", "--model.network.width=32", "--model.network.hidden=48"),
    *("--model.network.context=32", "--data.context=32", "--data.batch_size=4", "--logger.wandb=null"),
    *("--trainer.max_steps=4", "--trainer.val_check_interval=4", "--trainer.limit_val_batches=2"),
]


@pytest.mark.parametrize("variant", llama.VARIANTS)
def test_every_variant_changes_the_network(variant: str, geocont: Callable[..., tuple[int, str, str]]) -> None:
    """Protects long runs: each variant has valid arguments, and differs from the baseline as its file says."""
    printed = {}
    for name in {"baseline", variant}:
        job = llama.jobs("cpu", None, [name], 1)[0]
        status, printed[name], err = geocont("fit", *job.arguments, "--print_config")
        assert status == 0, err
    changed = set(printed[variant].splitlines()) - set(printed["baseline"].splitlines())
    assert "path: stdlib" in printed[variant]
    assert bool(changed) is (variant != "baseline")


def test_the_paper_preset_is_wikitext(geocont: Callable[..., tuple[int, str, str]]) -> None:
    """Protects the run at the paper's size: 34 million parameters, the hub's WikiText-103, no overlay of the small."""
    status, out, err = geocont("fit", *llama.jobs("paper", None, ["qk_norm"], 1)[0].arguments, "--print_config")
    assert status == 0, err
    for line in ("path: Salesforce/wikitext", "config: wikitext-103-raw-v1", "width: 512", "qk_norm: true"):
        assert line in out


def test_runs_become_rows_tables_and_figures(geocont: Callable[..., tuple[int, str, str]], folder: Path) -> None:
    """Protects the tables: every column is read from what the callbacks logged, under the keys they log it."""
    jobs = llama.jobs("cpu", None, ["baseline", "no_gate"], 2)
    runner = Runner(folder / "out", llama.plan("cpu", None), jobs)
    for job in jobs:
        options = ("--seed_everything", str(job.seed), "--run.dir", str(runner.folder(job)))
        status, out, err = geocont("fit", *job.arguments, *TINY, *options)
        assert status == 0, out + err
    with Console(file=(folder / "log").open("w")) as console:
        rows = llama.report(runner, console)
    assert [row["status"] for row in rows] == ["finished"] * 4
    assert [key for key, value in rows[0].items() if value is None] == []
    missing = [key for key, value in rows[1].items() if value is None]
    assert missing
    assert all("gate" in key for key in missing)
    assert rows[0]["gradient_v1_up_init"] > 0.5
    table = (folder / "out/table.md").read_text()
    assert "| no_gate  | 2 " in table
    assert "| down       | u1      | 0.141  |" in table  # sqrt(2 / (pi 32))
    assert (folder / "out/projections.csv").read_text().count("\n") == 1 + 14 + 12
    for name in ("llama.png", "llama-ablations.png"):
        assert (folder / "out" / name).stat().st_size > 10_000


def test_chance_is_what_random_directions_give() -> None:
    """Protects the level and the spread that everything is compared with, in two dimensions of the residual stream."""
    for dimension in (32, 344):
        a, b = torch.nn.functional.normalize(torch.randn(2, 40_000, dimension), dim=-1)
        cosines = (a * b).sum(-1).abs()
        assert cosines.mean().item() == pytest.approx(chance("v1", dimension) or 0, rel=0.02)
        assert cosines.std().item() == pytest.approx(chance_deviation(dimension), rel=0.02)


def test_seeds_decide_what_is_above_chance() -> None:
    """Protects from a verdict by eye: three seeds that agree by luck, or one seed alone, prove nothing."""
    level, deviation = chance("v1", 128) or 0.0, chance_deviation(128) / math.sqrt(7)
    assert separates([0.55, 0.6, 0.5], level, deviation) is True
    assert separates([0.072, 0.073, 0.0725], level, deviation) is False
    assert separates([0.3, 0.08, 0.1], level, deviation) is False
    assert separates([0.9], level, deviation) is None
    torch.manual_seed(0)
    null = [separates((level + deviation * torch.randn(3)).tolist(), level, deviation) for _ in range(2000)]
    assert sum(map(bool, null)) <= 30
