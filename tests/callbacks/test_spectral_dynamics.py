"""SpectralDynamics: the singular values of every matrix, by name and by number."""

from __future__ import annotations

import math
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from callbacks import SpectralDynamics
from geocont.measures.spectra import NAMES
from tests.callbacks.stranger import DEPTH, PATTERNS, Stranger, train
from tests.conftest import same


def every(steps: int = 1, **options: object) -> SpectralDynamics:
    return SpectralDynamics(steps, weights=PATTERNS, **options)  # type: ignore[arg-type]


def test_rows_hold_the_spectra_of_every_matrix_before_the_update() -> None:
    module, states = Stranger(), []

    class Spy(pl.Callback):
        def on_before_optimizer_step(self, *_: object) -> None:
            states.append([block.weight.detach().double().clone() for block in module.blocks])

    _, rows = train(module, [every(), Spy()], steps=3)
    states.append([block.weight.detach().double() for block in module.blocks])
    assert len(rows.measured("spectrum/sigma_max/hidden/layer_00")) == 4  # the final weights have a row as well
    for step, matrices in enumerate(states):
        for layer, w in enumerate(matrices):
            s, norms = torch.linalg.svdvals(w), w.norm(dim=0)
            gram = w.mT @ w
            expected = {
                "sigma_max": s[0],
                "sigma_min": s[-1],
                "condition": s[0] / s[-1],
                "stable_rank": (w.norm() / s[0]) ** 2,
                "gram_off_diagonal": (gram - gram.diag().diag()).norm() / gram.norm(),
                "column_norm_min": norms.min(),
                "column_norm_max": norms.max(),
            }
            for name, value in expected.items():
                logged = rows.measured(f"spectrum/{name}/hidden/layer_{layer:02d}")[step]
                assert logged == pytest.approx(value.item(), rel=1e-5), (step, layer, name)
    growth = rows.measured("spectrum/growth/hidden")
    assert set(growth) == {1, 2, 3}
    largest = [[torch.linalg.matrix_norm(w, 2).item() for w in matrices] for matrices in states]
    assert growth[2] == pytest.approx(max(now / then - 1 for now, then in zip(largest[2], largest[1], strict=True)))


def test_keys_and_rows_are_those_of_the_cadence() -> None:
    _, rows = train(Stranger(), [every(4)], steps=9)
    keys = {key for _, row in rows.rows for key in row if key.startswith("spectrum/")}
    layers = {f"spectrum/{name}/hidden/layer_{layer:02d}" for name in NAMES for layer in range(DEPTH)}
    assert keys == layers | {"spectrum/growth/hidden"}
    assert [step for step, row in rows.rows if "spectrum/sigma_max/hidden/layer_00" in row] == [0, 4, 8, 9]
    _, early = train(Stranger(), [every(4, log_spaced=True)], steps=5)
    assert [step for step, row in early.rows if "spectrum/sigma_max/hidden/layer_00" in row] == [0, 1, 2, 4, 5]


def test_layers_of_several_shapes_keep_their_numbers() -> None:
    """Where shapes changed, a layer's number was lost, and all later ones had their neighbour's values."""
    module = Stranger()
    module.blocks[2], module.blocks[3] = nn.Linear(20, 30), nn.Linear(30, 20)
    module.forward = lambda x: module.head(module.blocks[3](module.blocks[2](module.blocks[1](module.blocks[0](x)))))  # type: ignore[method-assign]
    _, rows = train(module, [every()], steps=1)
    for layer, block in enumerate(module.blocks):
        largest = torch.linalg.matrix_norm(block.weight.detach(), 2).item()
        assert rows.measured(f"spectrum/sigma_max/hidden/layer_{layer:02d}")[1] == pytest.approx(largest, rel=1e-5)


def test_what_has_no_value_is_counted_and_never_logged() -> None:
    module = Stranger(lr=0.0)
    module.blocks[1].weight.data[0, 0] = math.nan
    module.blocks[3].weight.data.zero_()
    _, rows = train(module, [every()], steps=2)
    assert all(math.isfinite(value) for _, row in rows.rows for key, value in row.items() if "train" not in key)
    assert rows.measured("measure/skipped")[0] >= len(NAMES)
    assert "spectrum/sigma_max/hidden/layer_01" not in rows.rows[0][1]


def test_a_resumed_run_logs_the_growth_of_an_uninterrupted_one(tmp_path: Path) -> None:
    """One batch an epoch, for a stranger's loader forgets its place."""
    _, whole = train(Stranger(), [every(2)], steps=8, batch_size=64)
    trainer, _ = train(Stranger(), [every(2)], steps=5, batch_size=64)
    trainer.save_checkpoint(tmp_path / "a.ckpt")  # after the final row, of which the resumed run knows nothing
    _, rest = train(Stranger(), [every(2)], steps=8, batch_size=64, ckpt_path=tmp_path / "a.ckpt")
    growth = whole.measured("spectrum/growth/hidden")
    assert rest.measured("spectrum/growth/hidden") == pytest.approx({step: growth[step] for step in (6, 8)})


def test_callbacks_used_again_start_anew_and_change_nothing() -> None:
    callback, plain, watched = every(), Stranger(), Stranger()
    train(plain, [], steps=4)
    train(watched, [callback], steps=4)
    assert same(plain.state_dict(), watched.state_dict())
    _, again = train(Stranger(lr=0.2), [callback], steps=2)
    _, fresh = train(Stranger(lr=0.2), [every()], steps=2)
    assert again.measured("spectrum/growth/hidden") == fresh.measured("spectrum/growth/hidden")
