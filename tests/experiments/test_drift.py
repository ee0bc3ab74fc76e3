"""The experiment on rotation against near-degeneracy: its decomposition on planted cases, and what it trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from geocont.experiments import drift, mlp
from geocont.experiments.runner import Runner

L, D = 4, 64


def frames(turn: float, mix: float) -> np.ndarray:
    """Leading vectors ``(L, D, 5)`` of layers that share a subspace, mixed within it and turned out of it by angles."""
    basis = torch.eye(D)
    layers = []
    for layer in range(L):
        vectors = basis[:, :5].clone()
        angle = torch.tensor(layer * turn)
        vectors[:, 0] = angle.cos() * basis[:, 0] + angle.sin() * basis[:, 10]
        within = torch.tensor(layer * mix)
        first, second = vectors[:, 0].clone(), vectors[:, 1].clone()
        vectors[:, 0] = within.cos() * first + within.sin() * second
        vectors[:, 1] = -within.sin() * first + within.cos() * second
        layers.append(vectors)
    return torch.stack(layers).numpy()


@pytest.mark.parametrize(("turn", "mix"), [(0.5, 0.0), (0.0, 0.5)])
def test_turning_and_mixing_are_told_apart(turn: float, mix: float) -> None:
    """Protects the answer: whatever v1 loses to v2..v5 is mixing, whatever leaves the leading subspace is turning."""
    start, end = drift._squares(frames(0, 0)), drift._squares(frames(turn, mix))
    lost = (start - end)[:, 0, 0].mean()
    turned = drift._within(start).mean() - drift._within(end).mean()
    assert lost == pytest.approx(np.sin(0.5) ** 2, abs=1e-6)
    assert turned == pytest.approx(lost if turn else 0.0, abs=1e-6)
    moved, subspace = drift._turn(frames(0, 0), frames(turn, mix))
    assert moved > 0.1
    assert (subspace > 0.05) is bool(turn)


@pytest.mark.parametrize("variant", drift.VARIANTS)
def test_every_variant_is_a_configuration(variant: str, geocont: Callable[..., tuple[int, str, str]]) -> None:
    """Protects long runs: each variant has valid arguments, and forces a gap if its name says so."""
    status, out, err = geocont("fit", *drift.jobs("cpu", None, [variant], 1)[0].arguments, "--print_config")
    assert status == 0, err
    assert ("ratio: 1.2" in out) is variant.endswith("_gap")
    assert ("start_step: 100" in out) is variant.endswith("_gap")


@pytest.mark.parametrize("variant", [name for name in mlp.VARIANTS if name not in mlp.CORE])
def test_every_variant_of_mlp_is_a_configuration(variant: str, geocont: Callable[..., tuple[int, str, str]]) -> None:
    """Protects the further comparisons of the first paper in the same way."""
    status, out, err = geocont("fit", *mlp.jobs("cpu", None, [variant], 1)[0].arguments, "--print_config")
    assert status == 0, err
    assert ("activation: none" in out) is variant.startswith("none")


def test_short_runs_become_a_table_and_a_figure(geocont: Callable[..., tuple[int, str, str]], folder: Path) -> None:
    """Protects the report, verdicts included: every column is read from what the callbacks stored."""
    jobs = drift.jobs("smoke", None, ["none", "none_gap"], 2)
    runner = Runner(folder / "out", drift.plan("smoke", None), jobs)
    for job in jobs:
        options = ["--seed_everything", str(job.seed), "--run.dir", str(runner.folder(job)), "--logger.wandb=null"]
        options += ["--model.network.depth=3", "--model.network.width=32"]
        status, out, err = geocont("fit", *job.arguments, *options)
        assert status == 0, out + err
    with Console(file=(folder / "log").open("w")) as console:
        rows = drift.report(runner, console)
    assert [row["status"] for row in rows] == ["finished"] * 4
    assert rows[0]["lost"] == pytest.approx(rows[0]["mixed"] + rows[0]["turned"])
    assert all(row["gap_end"] >= 1.19 for row in rows if row["variant"] == "none_gap")
    assert "Res+None: a forced gap of 1.2 changes v1 at the end by" in (folder / "out/table.md").read_text()
    assert (folder / "out/drift.png").stat().st_size > 10_000
