"""The measuring callbacks in someone else's Lightning project."""

from __future__ import annotations

import math
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn

from callbacks import GradientCoherence, StepMonitor, WeightContinuity
from callbacks.cadence import Cadence
from geocont.errors import UserError
from geocont.measures.continuity import light_table
from tests.callbacks.stranger import DEPTH, PATTERNS, Stranger, loader, train
from tests.conftest import same


def both(every_n_steps: int = 1, **options: object) -> list[pl.Callback]:
    return [
        GradientCoherence(every_n_steps, weights=PATTERNS, **options),  # type: ignore[arg-type]
        WeightContinuity(every_n_steps, weights=PATTERNS, **options),  # type: ignore[arg-type]
    ]


def test_cadence_counts_optimizer_steps_with_log_spaced_early_ones() -> None:
    cadence = Cadence(every_n_steps=50)
    assert [step for step in range(160) if cadence.fires(step)] == [0, 1, 2, 4, 8, 16, 32, 50, 100, 150]
    assert [step for step in range(1001) if cadence.is_full(step) and cadence.fires(step)] == [
        *(0, 1, 2, 4, 8, 16, 32),
        *(500, 1000),
    ]
    assert [step for step in range(120) if Cadence(50, log_spaced=False).fires(step)] == [0, 50, 100]
    with pytest.raises(UserError, match="every_n_steps must be a whole number of at least 1, got 0"):
        Cadence(0)


def test_rows_describe_the_state_before_the_update() -> None:
    module, states = Stranger(), []

    class Spy(pl.Callback):
        def on_before_optimizer_step(
            self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: object
        ) -> None:
            weights = torch.stack([block.weight.detach().clone() for block in module.blocks])
            gradients = torch.stack([block.weight.grad.clone() for block in module.blocks])
            states.append((weights, gradients))

    _, rows = train(module, [*both(), Spy()], steps=3)
    sums = torch.zeros_like(states[0][1])
    for step, (weights, gradients) in enumerate(states):
        sums += gradients
        families = {"weight": weights, "gradient": gradients}
        if step:
            families |= {"cumulative": sums, "update": weights - states[0][0]}
        for family, stack in families.items():
            values = light_table(stack).values
            for name in ("v1", "u1", "topk_in", "topk_out", "cosine", "gap", "defined"):
                logged = rows.measured(f"{family}/{name}/hidden")[step]
                assert logged == pytest.approx(values[name].mean().item(), abs=1e-4), (family, name, step)
    norm = ((states[2][0] - states[0][0]).norm(dim=(1, 2)) / states[0][0].norm(dim=(1, 2))).mean()
    assert rows.measured("update/relative_norm/hidden")[2] == pytest.approx(norm.item(), rel=1e-5)
    final = torch.stack([block.weight.detach() for block in module.blocks])
    assert rows.measured("weight/v1/hidden")[3] == pytest.approx(
        light_table(final).values["v1"].mean().item(), abs=1e-4
    )
    assert 3 not in rows.measured("gradient/v1/hidden")  # there is no gradient after the last update


def test_training_is_bit_identical_with_and_without_callbacks() -> None:
    """A probe that draws random numbers or touches .grad changes the training that it watches."""
    plain, watched = Stranger(), Stranger()
    train(plain, [], steps=10)
    train(watched, [*both(), StepMonitor(1)], steps=10)
    assert same(plain.state_dict(), watched.state_dict())


def test_accumulated_batches_measure_like_one_and_give_one_row_an_update() -> None:
    """With accumulation, hooks that count batches fire several times for one update, on partial gradients."""
    whole, parts = Stranger(), Stranger()
    _, rows_whole = train(whole, both(), steps=4, batch_size=8)
    _, rows_parts = train(parts, both(), steps=4, batch_size=2, accumulate_grad_batches=4)
    measured = [(step, row) for step, row in rows_parts.rows if "weight/v1/hidden" in row]
    assert [step for step, _ in measured] == [0, 1, 2, 3, 4]
    for step, row in rows_whole.rows:
        for key, value in row.items():
            if key.split("/")[0] in ("weight", "gradient", "cumulative", "update"):
                assert rows_parts.measured(key)[step] == pytest.approx(value, abs=1e-5), (step, key)


def test_a_short_epoch_still_fires_once_an_update() -> None:
    """7 batches, 3 accumulated, 2 epochs: 6 updates, whatever the number of leftover batches."""
    trainer, rows = train(
        Stranger(), both(), steps=-1, batch_size=2, max_epochs=2, accumulate_grad_batches=3, limit_train_batches=7
    )
    assert trainer.global_step == 6
    assert [step for step, row in rows.rows if "gradient/v1/hidden" in row] == [0, 1, 2, 3, 4, 5]


def test_losses_share_the_step_of_the_measures_and_the_own_cadence_stays() -> None:
    trainer, rows = train(Stranger(), both(4), steps=11, log_every_n_steps=5)
    steps = sorted(rows.measured("train/loss"))
    assert steps == [0, 1, 2, 4, 8, 9]  # firings, and the trainer's own: its 5th and 10th update
    assert set(rows.measured("weight/v1/hidden")) == {0, 1, 2, 4, 8, 11}
    assert trainer.log_every_n_steps == 5  # type: ignore[attr-defined]


def test_any_measure_can_be_monitored(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, monitor="weight/v1/hidden", mode="max", every_n_train_steps=1, save_top_k=2)
    stop = EarlyStopping("gradient/v1/hidden", patience=1, mode="max", min_delta=10.0)
    trainer, _ = train(
        Stranger(),
        [*both(), checkpoint, stop],
        steps=-1,
        max_epochs=9,
        enable_checkpointing=True,
        limit_val_batches=1,
    )
    assert len(checkpoint.best_k_models) == 2
    assert 0 < float(checkpoint.best_model_score) <= 1
    assert trainer.current_epoch == 2  # stopped early
    assert trainer.callback_metrics["weight/gap/hidden"] > 1


def test_state_survives_a_checkpoint_and_instances_do_not_mix(tmp_path: Path) -> None:
    """Two instances of one class overwrote each other's state, because both used the class name as key."""
    callbacks = [*both(), GradientCoherence(2, weights={"hidden": r"blocks\.([12])\.weight"})]
    trainer, _ = train(Stranger(), callbacks, steps=4)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)["callbacks"]
    sizes = {len(state["cumulative"]) for key, state in saved.items() if key.startswith("GradientCoherence")}
    assert sizes == {DEPTH, 2}
    again = [*both(), GradientCoherence(2, weights={"hidden": r"blocks\.([12])\.weight"})]
    other = pl.Trainer(max_steps=4, callbacks=list(again), logger=False, accelerator="cpu", enable_progress_bar=False)
    other.fit(Stranger(), loader(), ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    for before, after in zip(callbacks, again, strict=True):
        if isinstance(before, GradientCoherence):
            assert same(before._cumulative, after._cumulative)
            assert same(before._initial, after._initial)


def test_a_failing_measurement_is_said_once_and_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no convergence")

    monkeypatch.setattr("callbacks.continuity_rows.light_table", fail)
    with pytest.warns(UserWarning, match="WeightContinuity could not measure step 0: RuntimeError: no conv") as caught:
        trainer, _ = train(Stranger(), [WeightContinuity(1, weights=PATTERNS)], steps=3)
    assert trainer.global_step == 3
    assert sum("could not measure" in str(warning.message) for warning in caught) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_weights_and_gradients_are_counted_and_never_logged(bad: float) -> None:
    module = Stranger(lr=0.0)
    with torch.no_grad():
        module.blocks[2].weight[0, 0] = bad
        module.blocks[4].weight.zero_()
    _, rows = train(module, both(), steps=2)
    for _, row in rows.rows:
        assert all(math.isfinite(value) for key, value in row.items() if not key.startswith("train/")), row
    assert rows.measured("measure/skipped")[0] > 0
    assert 0 in rows.measured("weight/v1/hidden")  # layers 0 and 1 still form a pair


def test_frozen_matrices_and_unused_parameters_have_weights_but_no_gradients() -> None:
    module = Stranger()
    for block in module.blocks:
        block.weight.requires_grad_(False)
    _, rows = train(module, both(), steps=2)
    assert 0 in rows.measured("weight/v1/hidden")
    assert not rows.measured("gradient/v1/hidden")


def test_layers_of_several_shapes_are_paired_where_they_match() -> None:
    module = Stranger()
    module.blocks[3] = nn.Linear(20, 30)
    module.blocks[4] = nn.Linear(30, 20)
    module.forward = lambda x: module.head(module.blocks[4](module.blocks[3](module.blocks[1](module.blocks[0](x)))))  # type: ignore[method-assign]
    _, rows = train(module, [WeightContinuity(1, weights=PATTERNS)], steps=1)
    stack = torch.stack([module.blocks[i].weight.detach() for i in range(3)])
    assert rows.measured("weight/v1/hidden")[1] == pytest.approx(
        light_table(stack).values["v1"].mean().item(), abs=1e-4
    )


def test_a_module_without_a_map_is_told_how_to_give_one() -> None:
    with pytest.raises(UserError, match=r"Stranger has no weight_map\(\); give the matrices as `weights: {q: "):
        train(Stranger(), [WeightContinuity()])
    with pytest.raises(UserError, match="nearest matrices are blocks.0.weight"):
        train(Stranger(), [WeightContinuity(weights={"hidden": r"blocks\.(\d+)\.wieght"})])


def test_validation_before_training_and_sanity_checks_leave_no_rows() -> None:
    callbacks = [*both(), StepMonitor()]
    module = Stranger()
    trainer = pl.Trainer(logger=False, callbacks=list(callbacks), enable_progress_bar=False, accelerator="cpu")
    trainer.validate(module, loader(), verbose=False)
    _, rows = train(Stranger(), callbacks, steps=1, num_sanity_val_steps=2, limit_val_batches=2)
    assert [step for step, row in rows.rows if "weight/v1/hidden" in row] == [0, 1]


def test_compiled_modules_keep_their_names() -> None:
    """torch.compile puts _orig_mod into names: patterns and checkpoints then miss their matrices."""
    module = Stranger()
    module.blocks[1] = torch.compile(module.blocks[1], backend="eager")  # type: ignore[assignment]
    _, rows = train(module, both(), steps=1)
    plain = Stranger()
    _, expected = train(plain, both(), steps=1)
    key = "gradient/v1/hidden"
    assert rows.measured(key)[0] == pytest.approx(expected.measured(key)[0], abs=1e-5)


def test_monitor_counts_samples_and_learning_rates() -> None:
    _, rows = train(Stranger(), [StepMonitor(2)], steps=5)
    assert rows.measured("lr/0") == {0: 0.1, 2: 0.1, 4: 0.1}
    assert set(rows.measured("throughput/samples_per_second")) == {2, 4}
    assert all(value > 0 for value in rows.measured("throughput/samples_per_second").values())


@pytest.mark.parametrize("logs", [True, False])
def test_a_plain_wandb_logger_gets_one_row_for_each_measured_step(tmp_path: Path, logs: bool) -> None:
    """Each log call is a W&B row: measures and losses of one step once landed in several, some of them empty."""
    from lightning.pytorch.loggers import WandbLogger

    from tests.runs.test_wandb import read_history, run_file

    logger = WandbLogger(save_dir=tmp_path, offline=True)
    train(Stranger(logs=logs), both(2), steps=5, logger=logger, log_every_n_steps=100)
    logger.experiment.finish()
    rows = read_history(run_file(tmp_path))
    assert [row["trainer/global_step"] for row in rows] == [0, 1, 2, 4, 5]
    assert all("weight/v1/hidden" in row for row in rows)
    assert ["train/loss" in row for row in rows] == [*[logs] * 4, False]


class TwoOptimizers(Stranger):
    """Steps the blocks at every third batch and the head at every batch, by hand."""

    automatic_optimization = False

    def training_step(self, batch: tuple, batch_idx: int) -> None:  # type: ignore[override]
        blocks, head = self.optimizers()
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.manual_backward(loss)
        self.log("train/loss", loss)
        head.step()
        head.zero_grad()
        if batch_idx % 3 == 2:
            self.summed = [total + block.weight.grad for total, block in zip(self.summed, self.blocks, strict=True)]
            blocks.step()
            blocks.zero_grad()

    def configure_optimizers(self) -> list:  # type: ignore[override]
        self.summed = [torch.zeros_like(block.weight) for block in self.blocks]
        return [torch.optim.SGD(part.parameters(), 0.1) for part in (self.blocks, self.head)]


def test_several_optimizers_sum_what_each_steps_on_and_lose_no_row() -> None:
    """Gradients that another optimizer left for later were added again at each of its steps."""
    module, callback = TwoOptimizers(), GradientCoherence(1, weights=PATTERNS)
    _, rows = train(module, [callback], steps=12)
    for i, total in enumerate(module.summed):
        assert torch.allclose(callback._cumulative[f"blocks.{i}.weight"], total, atol=1e-6)
    assert [step for step, row in rows.rows if "gradient/v1/hidden" in row] == list(range(12))


def test_callbacks_used_again_start_anew() -> None:
    """In a loop over folds, the second model was measured against the first one's initial weights."""
    callbacks = both()
    train(Stranger(), callbacks, steps=3)
    _, again = train(Stranger(lr=0.2), callbacks, steps=3)
    _, fresh = train(Stranger(lr=0.2), both(), steps=3)
    key = "update/relative_norm/hidden"
    assert again.measured(key) == pytest.approx(fresh.measured(key))
