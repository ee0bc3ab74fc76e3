"""WeightContinuity: how the weight matrices of adjacent layers line up, while they are trained."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import Trainer

from callbacks.continuity_rows import ContinuityRows
from callbacks.measuring import MeasuringCallback, Patterns


class WeightContinuity(MeasuringCallback):
    """Logs the continuity of weights through depth, ``weight/{measure}/{projection}``.

    The light set (``v1 u1 topk_in topk_out cosine gap defined``) at every firing; ``sigma2`` and ``gram`` on both sides
    at full firings. The values of each pair and the leading vectors go to the run's local store.

    Args:
        every_n_steps: Measure every so many optimizer steps.
        log_spaced: Measure at steps 1, 2, 4, 8 ... below ``every_n_steps`` too, for early dynamics.
        full_every_n_firings: Compute the full table at every so manieth regular firing (and at log-spaced ones).
        weights: Projection -> regular expression of parameter names, the first group being the depth, e.g.
            ``{q: 'layers\\.(\\d+)\\.attn\\.q_proj\\.weight'}``. By default the module's own ``weight_map()``.
    """

    def __init__(
        self,
        every_n_steps: int = 50,
        log_spaced: bool = True,
        full_every_n_firings: int = 10,
        weights: Patterns | None = None,
    ) -> None:
        super().__init__(every_n_steps, log_spaced, full_every_n_firings, weights)
        self._rows = ContinuityRows("weight")

    def measure(self, trainer: Trainer, full: bool, final: bool) -> None:
        """Measures W_s."""
        started = time.perf_counter()
        self._rows.begin()
        for projection in self.map.projections:
            matrices = self.map.gather(projection, self.parameters)
            self._rows.measure(projection, matrices, full, keep_start=not final)
        self.record(trainer, [self._rows], started, headline=("continuity", self._rows))

    def state_dict(self) -> dict[str, Any]:
        """Returns the warm starts: tensors only."""
        return {"weight": self._rows.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the warm starts of a checkpoint."""
        self._rows.load_state_dict(state_dict["weight"])
