"""SpectralGap: the gap is there after every step, nothing else changes, and a resumed run goes on as it would have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from callbacks import SpectralGap
from geocont.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:::lightning", "ignore:.*treespec:FutureWarning")
PATTERNS: Any = {"hidden": r"layers\.(\d+)\.weight"}


class Stranger(LightningModule):
    """A residual network that knows nothing of geocont."""

    def __init__(self, rate: float = 1e-2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(24, 24, bias=False) for _ in range(3))
        self.rate = rate

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = batch[0]
        for layer in self.layers:
            h = h + layer(h)
        return h.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.rate)


def data() -> DataLoader:
    """One batch an epoch, so that a position in it plays no part."""
    return DataLoader(TensorDataset(torch.randn(4, 24, generator=torch.Generator().manual_seed(1))), batch_size=4)


def trained(folder: Path, model: Stranger, steps: int, *callbacks: Any, **options: Any) -> Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "accelerator": "cpu", "default_root_dir": folder}
    trainer = Trainer(max_steps=steps, callbacks=list(callbacks), **quiet)
    trainer.fit(model, data(), **options)
    return trainer


def gaps(model: Stranger) -> Tensor:
    s = torch.stack([torch.linalg.svdvals(layer.weight.detach()) for layer in model.layers])
    return s[:, 0] / s[:, 1]


def test_the_gap_is_enforced_from_its_step_on(tmp_path: Path) -> None:
    """A gap that is not there, or there too early, would make the experiment answer another question."""
    free, early, late = Stranger(), Stranger(), Stranger()
    trained(tmp_path, free, 6)
    trained(tmp_path, early, 6, SpectralGap(1.5, weights=PATTERNS))
    trained(tmp_path, late, 6, SpectralGap(1.5, start_step=7, weights=PATTERNS))
    assert gaps(free).min() < 1.3
    assert gaps(early).min() > 1.499
    assert all(torch.equal(a, b) for a, b in zip(free.parameters(), late.parameters(), strict=True))


def test_only_the_leading_singular_value_changes(tmp_path: Path) -> None:
    """Directions and the other singular values are what the optimizer made them."""
    model = Stranger(rate=0.0)
    before = [layer.weight.detach().clone() for layer in model.layers]
    trained(tmp_path, model, 1, SpectralGap(2.0, weights=PATTERNS))
    for layer, was in zip(model.layers, before, strict=True):
        u, s, v = torch.linalg.svd(was)
        assert s[0] / s[1] < 1.9
        expected = torch.cat([2 * s[1:2], s[1:]])
        torch.testing.assert_close(u.mT @ layer.weight.detach() @ v.mT, torch.diag(expected), atol=2e-2, rtol=0)


def test_a_resumed_run_takes_the_same_steps(tmp_path: Path) -> None:
    """The warm starts travel in the checkpoint, so that a stopped run ends where an uninterrupted one does."""
    whole, first = Stranger(), Stranger()
    trained(tmp_path, whole, 6, SpectralGap(1.5, weights=PATTERNS))
    trained(tmp_path, first, 3, SpectralGap(1.5, weights=PATTERNS)).save_checkpoint(tmp_path / "c.ckpt")
    resumed = Stranger()
    with torch.random.fork_rng():
        trained(tmp_path, resumed, 6, SpectralGap(1.5, weights=PATTERNS), ckpt_path=tmp_path / "c.ckpt")
    assert all(isinstance(key, str) for key in torch.load(tmp_path / "c.ckpt", weights_only=True)["callbacks"])
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def test_a_ratio_of_one_is_refused() -> None:
    """At one there is no gap, and below it the option would do nothing, silently."""
    with pytest.raises(UserError, match=r"spectral_gap\.ratio must be above 1, got 1\.0"):
        SpectralGap(1.0)
