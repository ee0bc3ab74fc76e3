"""SpectralGap: an intervention, not a measurement: it holds the leading singular direction of matrices apart."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from callbacks.measuring import Patterns, find_weights
from geocont.errors import UserError
from geocont.linalg import leading_subspace
from geocont.weights import Matrix, canonical_name


class SpectralGap(Callback):
    """Keeps s1 / s2 of every matrix at least at a ratio, by lengthening s1 after each optimizer step.

    A leading singular vector is well defined only where s1 stands out. Where continuity falls although it does, layers
    have turned against each other; where it then stays, its fall was near-degeneracy. ``geocont reproduce drift`` asks
    that. Directions are left as they are: W + (ratio s2 - s1) u1 v1^T where s1 is below ratio s2.

    Args:
        ratio: Least s1 / s2, above 1.
        start_step: The first optimizer step after which it is enforced; by default the first of all.
        weights: Projection -> regular expression of parameter names, as of WeightContinuity; by default the module's
            own ``weight_map()``.
    """

    def __init__(self, ratio: float = 1.2, start_step: int = 1, weights: Patterns | None = None) -> None:
        super().__init__()
        if not ratio > 1:
            raise UserError(f"spectral_gap.ratio must be above 1, got {ratio!r}")
        self.ratio, self.start_step, self.weights = ratio, start_step, weights
        self._starts: dict[str, Tensor] = {}  # projection -> block that warms the next solve
        self._handles: list[RemovableHandle] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Follows the optimizers' steps, so that whatever comes after a step sees the enforced weights."""
        projections = find_weights(pl_module, self.weights, type(self).__name__).projections
        named = {canonical_name(name): parameter for name, parameter in pl_module.named_parameters()}

        def enforce(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if trainer.global_step + 1 >= self.start_step:
                for projection, layers in projections.items():
                    self._enforce(projection, layers, named)

        self._handles = [optimizer.register_step_post_hook(enforce) for optimizer in trainer.optimizers]

    @torch.no_grad()
    def _enforce(self, projection: str, layers: list[Matrix], named: dict[str, torch.nn.Parameter]) -> None:
        matrices = [matrix.of(named[matrix.parameter]) for matrix in layers]
        found = leading_subspace(torch.stack(matrices), 2, start=self._starts.get(projection))
        self._starts[projection] = found.start
        lacking = (self.ratio * found.s[:, 1] - found.s[:, 0]).clamp(min=0).nan_to_num()  # (L,)
        for matrix, length, u, v in zip(matrices, lacking, found.u[..., 0], found.v[..., 0], strict=True):
            matrix.add_(torch.outer(length * u, v))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lets the optimizers go."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Lets the optimizers go."""
        self.on_train_end(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """Returns the warm starts, so that a resumed run takes the very steps of an uninterrupted one."""
        return {"starts": self._starts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the state of a checkpoint."""
        self._starts = dict(state_dict["starts"])
