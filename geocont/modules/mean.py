"""The mean of a loss over everything that is scored, exact however it is spread over batches and ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric


class ScoredMean(Metric):
    """Mean loss over what is scored in batches of any size, and over all ranks; NaN if nothing is."""

    full_state_update = False
    total: Tensor
    residue: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("residue", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, total: Tensor, count: Tensor) -> None:
        """Adds a sum of losses, and their number, both ``()``."""
        before = self.total
        self.total = before + total
        # Knuth's two-sum: what float32 has just rounded off (float64 would do, but not on every accelerator)
        added = self.total - before
        self.residue = self.residue + ((before - (self.total - added)) + (total - added))
        self.count = self.count + count

    def compute(self) -> Tensor:
        """Returns the mean ``()``."""
        return (self.total + self.residue) / self.count
