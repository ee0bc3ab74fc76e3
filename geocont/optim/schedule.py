"""Learning rate schedules, in optimizer steps, as factors that scale every parameter group together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from geocont.errors import UserError


@dataclass
class Schedule:
    """The factor by which learning rates are multiplied, as a function of the optimizer step.

    Attributes:
        shape: After warm-up: ``constant``, half a ``cosine`` down to ``floor``, or ``linear`` down to ``floor``.
        warmup_steps: Steps of linear rise from 1 / warmup_steps of the peak; 0 for none.
        total_steps: Step at which ``floor`` is reached; by default the length of the training.
        floor: Final factor.
    """

    shape: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    floor: float = 0.0

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise UserError(f"schedule.warmup_steps must not be negative, got {self.warmup_steps}")
        if not 0 <= self.floor <= 1:
            raise UserError(f"schedule.floor must be in [0, 1], got {self.floor}")
        if self.total_steps is not None and self.total_steps <= self.warmup_steps:
            raise UserError(
                f"schedule.total_steps must exceed warmup_steps ({self.warmup_steps}), got {self.total_steps}"
            )

    def factor(self, step: int, total_steps: int) -> float:
        """Returns the factor for the update that follows ``step`` updates, in a training of ``total_steps``."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.shape == "constant":
            return 1.0
        progress = min(1.0, (step - self.warmup_steps) / max(1, total_steps - self.warmup_steps))
        left = 0.5 * (1 + math.cos(math.pi * progress)) if self.shape == "cosine" else 1 - progress
        return self.floor + (1 - self.floor) * left

    def build(self, optimizer: Optimizer, training_steps: int | float) -> LambdaLR:
        """Returns the scheduler of an optimizer, to be stepped once for each optimizer step.

        Args:
            optimizer: All its groups are scaled.
            training_steps: Length of the training, used where ``total_steps`` is not set.

        Raises:
            UserError: The shape needs an end and the training has none.
        """
        total = training_steps if self.total_steps is None else self.total_steps
        if self.shape != "constant" and not 0 < total < math.inf:
            raise UserError(f"schedule.shape {self.shape} needs an end: set schedule.total_steps or trainer.max_steps")
        return LambdaLR(optimizer, lambda step: self.factor(step, int(min(total, 2**62))))
