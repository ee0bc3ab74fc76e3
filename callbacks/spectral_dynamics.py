"""SpectralDynamics: the singular values of every matrix, while they grow."""

from __future__ import annotations

import math
import time

from lightning.pytorch import Trainer

from callbacks.collector import Collector
from callbacks.measuring import MeasuringCallback, Patterns
from geocont.measures.continuity import stacks_of_one_shape
from geocont.measures.spectra import spectra


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

    def measure(self, trainer: Trainer, full: bool, final: bool) -> None:
        """Measures W_s."""
        started = time.perf_counter()
        metrics: dict[str, float] = {}
        skipped = 0
        for projection, layers in self.map.projections.items():
            largest: list[float] = []
            depths = iter(layers)
            for stack in stacks_of_one_shape(self.map.gather(projection, self.parameters)):
                values = spectra(stack)
                largest += values["sigma_max"]
                for matrix, *of_layer in zip(depths, *values.values(), strict=False):
                    for name, value in zip(values, of_layer, strict=True):
                        if math.isfinite(value):
                            metrics[f"spectrum/{name}/{projection}/layer_{matrix.depth:02d}"] = value
                        else:
                            skipped += 1
            metrics |= self._growth(projection, trainer.global_step, largest)
        Collector.of(trainer).add(trainer, metrics, skipped=skipped, milliseconds=1e3 * (time.perf_counter() - started))

    def _growth(self, projection: str, step: int, largest: list[float]) -> dict[str, float]:
        before, values = self._last.get(projection, (step, largest))
        self._last[projection] = (step, largest)
        if step <= before or not all(value > 0 for value in values):
            return {}
        rates = [(now / then - 1) / (step - before) for now, then in zip(largest, values, strict=True)]
        return {f"spectrum/growth/{projection}": max(rates)}
