"""WeightContinuity: how the weight matrices of adjacent layers line up, while they are trained."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from callbacks.collector import Collector
from callbacks.continuity_rows import ContinuityRows
from callbacks.measuring import MeasuringCallback, Patterns
from callbacks.media import Media, Table, takes_media
from geocont.errors import UserError
from geocont.measures.continuity import TOP_K

TABLE_ROWS = 5000
"""Most rows of the table of pairs, which makes it about as large as the heat maps of a transformer."""

Firings = dict[str, list[Tensor]]
"""Projection -> for each firing the step, the values of its P pairs, and whether each is defined, ``(1 + 2 P,)``."""


class WeightContinuity(MeasuringCallback):
    """Logs the continuity of weights through depth, ``weight/{measure}/{projection}``.

    The light set (``v1 u1 topk_in topk_out cosine gap defined``) at every firing; ``sigma2`` and ``gram`` on both
    sides at full firings. The values of each pair and the leading vectors go to the run's local store. A W&B logger
    gets all pairs over training, of the side that theory expects (``u1`` where a projection writes to the residual
    stream, otherwise ``v1``): as a heat map, ``weight/heat_map/{projection}``, and as one table to filter and to plot,
    ``weight/pairs``, with the columns ``step, projection, pair, measure, value, defined``. Pairs are counted from 0;
    one without a value has no row. Where there are more than 5,000 rows, the table holds evenly spaced firings only,
    the first and the last among them.

    Args:
        every_n_steps: Measure every so many optimizer steps.
        log_spaced: Measure at steps 1, 2, 4, 8 ... below ``every_n_steps`` too, for early dynamics.
        full_every_n_firings: Compute the full table at every so manieth regular firing (and at log-spaced ones).
        weights: Projection -> regular expression of parameter names, the first group being the depth, e.g.
            ``{q: 'layers\\.(\\d+)\\.attn\\.q_proj\\.weight'}``. By default the module's own ``weight_map()``.
        image_every_seconds: Send the heat maps and the table at most that often, and at the end of training.
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
        self._history: Firings = {}
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
        # A resumed training measures the last step again, so what it goes on from must not hold it.
        firings = {name: list(rows) for name, rows in self._history.items()} if final else self._history
        self._remember(firings, trainer.global_step)
        due = final or (full and time.monotonic() - self._drawn > self.image_every_seconds)
        if due and takes_media(trainer):
            media: dict[str, Media] = {**self._draw(firings), "weight/pairs": self._tabulate(firings)}
            Collector.of(trainer).add(trainer, {}, media=media)
            self._drawn = time.monotonic()

    def _measure(self, projection: str, full: bool, final: bool) -> None:
        matrices = self.map.gather(projection, self.parameters)
        self._rows.measure(projection, matrices, full, keep_start=not final)

    def _side(self, projection: str) -> str:
        """Returns the measure of the side that theory expects."""
        return "u1" if self.map.projections[projection][0].side == "writes" else "v1"

    def _remember(self, firings: Firings, step: int) -> None:
        for projection in self.map.projections:
            keys = [f"weight/{name}/{projection}" for name in (self._side(projection), "defined")]
            if keys[0] in self._rows.arrays:  # could be measured
                pairs = [self._rows.arrays[key].float().cpu() for key in keys]
                firings.setdefault(projection, []).append(torch.cat([torch.tensor([float(step)]), *pairs]))

    def _draw(self, firings: Firings) -> dict[str, np.ndarray]:
        from geocont.report.plots import as_pixels, heat_map  # matplotlib takes a while to import

        images = {}
        for projection, rows in firings.items():
            steps, values, defined = _split(torch.stack(rows))
            title = f"{self._side(projection)} of adjacent layers' weights: {projection}"
            images[f"weight/heat_map/{projection}"] = as_pixels(heat_map(steps, values, defined, title))
        return images

    def _tabulate(self, firings: Firings) -> Table:
        pairs = sum(len(rows[-1]) // 2 for rows in firings.values())
        rows: list[tuple[int | float | str | bool, ...]] = []
        for projection, all_rows in firings.items():
            steps, values, defined = _split(_thinned(torch.stack(all_rows), TABLE_ROWS // max(1, pairs)))
            for i, pair in np.argwhere(np.isfinite(values)).tolist():
                value = round(float(values[i, pair]), 6)
                rows.append((steps[i], projection, pair, self._side(projection), value, bool(defined[i, pair])))
        return Table(("step", "projection", "pair", "measure", "value", "defined"), rows[:TABLE_ROWS])

    def state_dict(self) -> dict[str, Any]:
        """Returns the warm starts of all ranks and the history of the heat maps: tensors only."""
        history = {projection: torch.stack(firings) for projection, firings in self._history.items()}
        return {"weight": self.whole(self._rows.state_dict()), "history": history}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the state of a checkpoint."""
        super().load_state_dict(state_dict)
        self._rows.load_state_dict(state_dict["weight"])
        self._history = {projection: list(table) for projection, table in state_dict["history"].items()}


def _split(firings: Tensor) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Returns steps ``(T,)``, values and whether they are defined ``(T, P)``, of firings ``(T, 1 + 2 P)``."""
    table = firings.numpy()
    values, defined = np.split(table[:, 1:], 2, axis=1)
    return table[:, 0].astype(int).tolist(), values, defined > 0


def _thinned(firings: Tensor, most: int) -> Tensor:
    """Returns at most so many evenly spaced firings, the first and the last among them if there is room for two."""
    if len(firings) <= most:
        return firings
    return firings[np.linspace(len(firings) - 1, 0, max(1, most)).round()[::-1].astype(int)]
