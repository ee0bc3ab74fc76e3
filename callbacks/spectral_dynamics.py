"""SpectralDynamics: the singular values of every matrix, while they grow."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from callbacks.collector import Collector
from callbacks.measuring import MeasuringCallback, Patterns
from geocont.measures.continuity import stacks_of_one_shape
from geocont.measures.spectra import spectra


@dataclass
class Share:
    """What one rank has measured."""

    metrics: dict[str, float] = field(default_factory=dict)
    largest: dict[str, list[float]] = field(default_factory=dict)  # projection -> sigma_max of each layer
    skipped: int = 0
    seconds: float = 0.0


class SpectralDynamics(MeasuringCallback):
    """Logs ``spectrum/{measure}/{projection}/layer_00`` of each matrix, and ``spectrum/growth/{projection}``.

    Measures are ``sigma_max``, ``sigma_min``, ``condition``, ``stable_rank``, ``gram_off_diagonal``,
    ``column_norm_min`` and ``column_norm_max``; columns are rows where a matrix is wide. ``growth`` is the relative
    change of sigma_max an optimizer step since the last firing, the largest over layers.

    Args:
        every_n_steps: Measure every so many optimizer steps.
        log_spaced: Measure at steps 1, 2, 4, 8 ... below ``every_n_steps`` too, for early dynamics.
        weights: Projection -> regular expression of parameter names, the first group being the depth. By default the
            module's own ``weight_map()``.
    """

    def __init__(self, every_n_steps: int = 100, log_spaced: bool = False, weights: Patterns | None = None) -> None:
        super().__init__(every_n_steps, log_spaced, 1, weights)
        self._last: dict[str, tuple[int, list[float]]] = {}  # projection -> step and sigma_max of each layer

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forgets what an earlier training left, unless a checkpoint brought it."""
        super().on_train_start(trainer, pl_module)
        if not self.restored():
            self._last = {}

    def measure(self, trainer: Trainer, full: bool, final: bool) -> None:
        """Measures W_s."""
        started = time.perf_counter()
        parts = self.exchange(trainer, lambda: self._own_share(trainer, started))
        metrics: dict[str, float] = {}
        for part in parts:
            metrics |= part.metrics
            for projection, largest in part.largest.items():
                metrics |= self._growth(projection, trainer.global_step, largest)
                if not final:  # a resumed run will not see this firing
                    self._last[projection] = (trainer.global_step, largest)
        milliseconds = 1e3 * max((part.seconds for part in parts), default=0.0)
        skipped = sum(part.skipped for part in parts)
        Collector.of(trainer).add(trainer, metrics, skipped=skipped, milliseconds=milliseconds)

    def _own_share(self, trainer: Trainer, started: float) -> Share:
        share = Share()
        for projection in filter(self.owns, self.map.projections):
            self.guarded(trainer, partial(self._measure, projection, share))
        share.seconds = time.perf_counter() - started
        return share

    def _measure(self, projection: str, share: Share) -> None:
        values: dict[str, list[float]] = {}
        for stack in stacks_of_one_shape(self.map.gather(projection, self.parameters)):
            for name, of_stack in spectra(stack).items():
                values.setdefault(name, []).extend(of_stack)
        for name, of_layers in values.items():
            for matrix, value in zip(self.map.projections[projection], of_layers, strict=True):
                if math.isfinite(value):
                    share.metrics[f"spectrum/{name}/{projection}/layer_{matrix.depth:02d}"] = value
                else:
                    share.skipped += 1
        share.largest[projection] = values["sigma_max"]

    def _growth(self, projection: str, step: int, largest: list[float]) -> dict[str, float]:
        before, values = self._last.get(projection, (step, []))
        if step <= before or len(values) != len(largest):
            return {}
        rates = [(now / then - 1) / (step - before) for now, then in zip(largest, values, strict=True) if then > 0]
        finite = [rate for rate in rates if math.isfinite(rate)]
        return {f"spectrum/growth/{projection}": max(finite)} if finite else {}

    def state_dict(self) -> dict[str, Any]:
        """Returns the sigma_max of the last firing, the same on every rank: plain values only."""
        return {"last": {projection: [step, list(largest)] for projection, (step, largest) in self._last.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the state of a checkpoint."""
        super().load_state_dict(state_dict)
        self._last = {projection: (step, largest) for projection, (step, largest) in state_dict["last"].items()}
