"""When a callback measures, counted in optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass

from geocont.errors import UserError


@dataclass(frozen=True)
class Cadence:
    """Fires at every multiple of ``every_n_steps`` and, for the early dynamics, at log-spaced steps 1, 2, 4, 8 ...

    A step is an update of the weights, whatever number of batches was accumulated for it. Step ``s`` is the state after
    ``s`` updates, so step 0 is the initial state. Log-spaced steps end where the regular ones begin.

    Attributes:
        every_n_steps: Distance of regular firings, in optimizer steps.
        log_spaced: Whether to fire at the powers of two below ``every_n_steps`` as well.
        full_every_n_firings: Among the regular firings, every how manieth computes the full table.
    """

    every_n_steps: int = 50
    log_spaced: bool = True
    full_every_n_firings: int = 10

    def __post_init__(self) -> None:
        for key in ("every_n_steps", "full_every_n_firings"):
            value = getattr(self, key)
            if not isinstance(value, int) or value < 1:
                raise UserError(f"{key} must be a whole number of at least 1, got {value!r}")

    def fires(self, step: int) -> bool:
        """Tells whether to measure at this optimizer step."""
        return step % self.every_n_steps == 0 or self._is_log_spaced(step)

    def is_full(self, step: int) -> bool:
        """Tells whether this firing computes the full table: at log-spaced steps and at every tenth regular firing."""
        return step % (self.every_n_steps * self.full_every_n_firings) == 0 or self._is_log_spaced(step)

    def _is_log_spaced(self, step: int) -> bool:
        return self.log_spaced and 0 < step < self.every_n_steps and step & (step - 1) == 0
