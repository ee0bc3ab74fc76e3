"""WeightContinuity: how the weight matrices of adjacent layers line up, while they are trained."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from callbacks.collector import Collector, takes_images
from callbacks.continuity_rows import ContinuityRows
from callbacks.measuring import MeasuringCallback, Patterns
from geocont.errors import UserError
from geocont.measures.continuity import TOP_K


class WeightContinuity(MeasuringCallback):
    """Logs the continuity of weights through depth, ``weight/{measure}/{projection}``.

    The light set (``v1 u1 topk_in topk_out cosine gap defined``) at every firing; ``sigma2`` and ``gram`` on both
    sides at full firings. The values of each pair and the leading vectors go to the run's local store. A W&B logger
    gets a heat map of all pairs over training, ``weight/heat_map/{projection}``, of the side that theory expects
    (``u1`` where a projection writes to the residual stream, otherwise ``v1``).

    Args:
        every_n_steps: Measure every so many optimizer steps.
        log_spaced: Measure at steps 1, 2, 4, 8 ... below ``every_n_steps`` too, for early dynamics.
        full_every_n_firings: Compute the full table at every so manieth regular firing (and at log-spaced ones).
        weights: Projection -> regular expression of parameter names, the first group being the depth, e.g.
            ``{q: 'layers\\.(\\d+)\\.attn\\.q_proj\\.weight'}``. By default the module's own ``weight_map()``.
        image_every_seconds: Draw the heat maps at most that often, and at the end of training.
        vectors: How many leading singular vectors of each side go to the local store at full firings, 1 to 6. More than
            one let a later analysis follow subspaces, at so many times the space.
    """

    def __init__(
        self,
        every_n_steps: int = 50,
        log_spaced: bool = True,
        full_every_n_firings: int = 10,
        weights: Patterns | None = None,
        image_every_seconds: float = 60.0,
        vectors: int = 1,
    ) -> None:
        super().__init__(every_n_steps, log_spaced, full_every_n_firings, weights)
        if not 1 <= vectors <= TOP_K + 1:
            raise UserError(f"weight_continuity.vectors must be from 1 to {TOP_K + 1}, got {vectors!r}")
        self.vectors = vectors
        self.image_every_seconds = image_every_seconds
        self._rows = ContinuityRows("weight", vectors=vectors)
        self._history: dict[str, list[Tensor]] = {}  # projection -> for each firing (step, values, defined), (1 + 2 P,)
        self._drawn = time.monotonic()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forgets what an earlier training left, unless a checkpoint brought it."""
        super().on_train_start(trainer, pl_module)
        if not self.restored():
            self._rows, self._history = ContinuityRows("weight", vectors=self.vectors), {}
        self._rows.keep_starts(self.owns, pl_module.device)

    def measure(self, trainer: Trainer, full: bool, final: bool) -> None:
        """Measures W_s."""
        started = time.perf_counter()
        self._rows.begin()
        for projection in filter(self.owns, self.map.projections):
            self.guarded(trainer, partial(self._measure, projection, full, final))
        self.record(trainer, [self._rows], started, headline=("continuity", self._rows))
        if not final:
            for projection, layers in self.map.projections.items():
                self._remember(projection, "u1" if layers[0].side == "writes" else "v1", trainer.global_step)
        due = final or (full and time.monotonic() - self._drawn > self.image_every_seconds)
        if due and takes_images(trainer):
            Collector.of(trainer).add(trainer, {}, media=self._draw())
            self._drawn = time.monotonic()

    def _measure(self, projection: str, full: bool, final: bool) -> None:
        matrices = self.map.gather(projection, self.parameters)
        self._rows.measure(projection, matrices, full, keep_start=not final)

    def _remember(self, projection: str, measure: str, step: int) -> None:
        if f"weight/{measure}/{projection}" not in self._rows.arrays:
            return  # could not be measured
        pairs = [self._rows.arrays[f"weight/{name}/{projection}"].float().cpu() for name in (measure, "defined")]
        self._history.setdefault(projection, []).append(torch.cat([torch.tensor([float(step)]), *pairs]))

    def _draw(self) -> dict[str, np.ndarray]:
        from geocont.report.plots import as_pixels, heat_map  # matplotlib takes a while to import

        images = {}
        for projection, firings in self._history.items():
            table = torch.stack(firings).numpy()
            values, defined = np.split(table[:, 1:], 2, axis=1)
            measure = "u1" if self.map.projections[projection][0].side == "writes" else "v1"
            title = f"{measure} of adjacent layers' weights: {projection}"
            figure = heat_map(table[:, 0].astype(int).tolist(), values, defined > 0, title)
            images[f"weight/heat_map/{projection}"] = as_pixels(figure)
        return images

    def state_dict(self) -> dict[str, Any]:
        """Returns the warm starts of all ranks and the history of the heat maps: tensors only."""
        history = {projection: torch.stack(firings) for projection, firings in self._history.items()}
        return {"weight": self.whole(self._rows.state_dict()), "history": history}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the state of a checkpoint."""
        super().load_state_dict(state_dict)
        self._rows.load_state_dict(state_dict["weight"])
        self._history = {projection: list(table) for projection, table in state_dict["history"].items()}
