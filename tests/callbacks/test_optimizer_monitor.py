"""OptimizerMonitor: what Manifold Muon knows of its steps, once for each row and the same on every rank."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from callbacks import OptimizerMonitor
from callbacks.shards import Shards
from geocont.optim import ManifoldMuon
from tests.callbacks.stranger import DEPTH, Stranger, train
from tests.conftest import same

KEYS = {f"{name}/matrices" for name in ("certified_ratio", "tangent_residual", "update_rms", "manifold_residual")}


class OnStiefel(Stranger):
    """Its blocks are stepped by Manifold Muon, its head rests."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        for parameter in self.head.parameters():
            parameter.requires_grad_(False)
        for block in self.blocks:
            block.bias.requires_grad_(False)
        named = [(f"blocks.{i}.weight", block.weight) for i, block in enumerate(self.blocks)]
        return ManifoldMuon(named, lr=0.1, manifold="stiefel")


def test_rows_hold_mean_and_worst_of_the_step_that_led_there() -> None:
    module, before = OnStiefel(), []

    class Spy(pl.Callback):
        def on_before_optimizer_step(self, *_: object) -> None:
            before.append([block.weight.detach().double().clone() for block in module.blocks])

    _, rows = train(module, [OptimizerMonitor(1), Spy()], steps=3)
    found = {key.removeprefix("optim/") for _, row in rows.rows for key in row if key.startswith("optim/")}
    assert found == KEYS | {f"{key}_worst" for key in KEYS} | {"skipped_steps"}
    assert set(rows.measured("optim/manifold_residual/matrices")) == {0, 1, 2}
    assert set(rows.measured("optim/certified_ratio/matrices")) == {1, 2}  # no step led to the first row
    for step in (1, 2):
        steps = zip(before[step - 1], before[step], strict=True)
        sizes = [(new - old).square().mean().sqrt().item() for old, new in steps]
        # (The weights are brought back to the manifold after the update, which takes a little of it.)
        assert rows.measured("optim/update_rms/matrices")[step] == pytest.approx(sum(sizes) / DEPTH, rel=0.05)
        assert rows.measured("optim/update_rms/matrices_worst")[step] == pytest.approx(max(sizes), rel=0.05)
        assert 0.9 < rows.measured("optim/certified_ratio/matrices_worst")[step] <= 1 + 1e-5
        ratios = [rows.measured(f"optim/certified_ratio/matrices{end}")[step] for end in ("", "_worst")]
        assert ratios[0] >= ratios[1]
        assert rows.measured("optim/manifold_residual/matrices_worst")[step] < 1e-4
    assert set(rows.measured("optim/skipped_steps").values()) == {0}


def test_rows_are_those_of_the_cadence_and_nothing_changes() -> None:
    plain, watched = OnStiefel(), OnStiefel()
    train(plain, [], steps=6)
    _, rows = train(watched, [OptimizerMonitor(3)], steps=6)
    assert same(plain.state_dict(), watched.state_dict())
    assert set(rows.measured("optim/skipped_steps")) == {0, 3}


def test_resumed_runs_go_on_counting(tmp_path: Path) -> None:
    class Bad(OnStiefel):
        def on_after_backward(self) -> None:
            if self.trainer.global_step == 1:
                self.blocks[0].weight.grad[0, 0] = float("inf")

    trainer, _ = train(Bad(), [OptimizerMonitor(1)], steps=3)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    _, rows = train(OnStiefel(), [OptimizerMonitor(1)], steps=5, ckpt_path=tmp_path / "a.ckpt")
    assert rows.measured("optim/skipped_steps") == {3: 1, 4: 1}
    assert set(rows.measured("optim/manifold_residual/matrices")) == {3, 4}


def test_another_optimizer_is_said_once() -> None:
    with pytest.warns(UserWarning, match="there is no geocont.optim.ManifoldMuon here"):
        _, rows = train(Stranger(), [OptimizerMonitor(1)], steps=2)
    assert not any(key.startswith("optim/") for _, row in rows.rows for key in row)


def test_statistics_of_other_ranks_are_gathered_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gathering is a collective: it may not depend on anything that a rank measures, or fails to measure."""

    class Sharded(torch.optim.SGD):
        gathered, skipped_steps = 0, 2

        def statistics(self) -> list[Any]:
            raise AssertionError("a rank knows its own matrices only")

        def gather_statistics(self) -> list[Any]:
            self.gathered += 1
            values = {"certified_ratio": 0.5, "tangent_residual": 0.1, "update_rms": 0.2}
            return [SimpleNamespace(module="mlp", **values) for _ in range(3)]

        def manifold_residuals(self) -> list[Any]:
            raise RuntimeError("no memory")

    class Module(Stranger):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            self.optimizer = Sharded(self.parameters(), 0.1)
            return self.optimizer

    exchanged = []
    monkeypatch.setattr(Shards, "gather", lambda self, value: (exchanged.append(value), [value])[1])
    module = Module()
    with pytest.warns(UserWarning, match="OptimizerMonitor could not measure step 0: RuntimeError: no memory"):
        train(module, [OptimizerMonitor(1)], steps=3)
    assert module.optimizer.gathered == len(exchanged) == 3
