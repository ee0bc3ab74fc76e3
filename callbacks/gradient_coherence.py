"""GradientCoherence: whether layers are pushed the same way, in one step and over the whole training so far."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from callbacks.continuity_rows import ContinuityRows
from callbacks.measuring import MeasuringCallback, Patterns
from callbacks.shards import deal, sharing_parameters
from geocont.measures.continuity import leading_alignment, relative_norm, stacks_of_one_shape

FAMILIES = ("gradient", "cumulative", "update", "weight")


class GradientCoherence(MeasuringCallback):
    """Logs the continuity through depth of gradients, of their sum so far and of W - W0.

    Keys are ``{gradient,cumulative,update}/{measure}/{projection}``, with ``update/relative_norm/{projection}``
    (||W - W0|| / ||W0||) and, at full firings, ``weight/cumulative_alignment/{projection}`` (abs <v1(W), v1(C)> of the
    weights and the cumulative gradient C).

    The gradient is that of the optimizer step: averaged over accumulated batches and ranks, unscaled, before clipping.
    Gradients are summed at every step, in float32 (in float64 for float64 parameters); with the initial weights that
    takes twice the memory of the matrices looked at. On several ranks each keeps and measures a share of the matrices.

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
        self._rows = _all_rows()
        self._owned: dict[int, dict[str, torch.nn.Parameter]] = {}  # optimizer -> the parameters that it steps
        self._initial: dict[str, Tensor] = {}  # parameter -> W0
        self._cumulative: dict[str, Tensor] = {}  # parameter -> sum of its gradients

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keeps W0, unless a checkpoint brought it; what an earlier training left is forgotten."""
        super().on_train_start(trainer, pl_module)
        self._owned = {}
        if not self.restored():
            self._initial, self._cumulative = {}, {}
            self._rows = _all_rows()
        for family in ("cumulative", "update"):
            self._rows[family].keep_starts(partial(self.owns, family=family), pl_module.device)
        self._initial = {
            name: self._initial.get(name, parameter.detach()).to(parameter.device, _kept_dtype(parameter), copy=True)
            for name, parameter in self._parameters_of("update").items()
        }
        self._cumulative = {
            name: self._cumulative[name].to(parameter.device, _kept_dtype(parameter))
            if name in self._cumulative
            else torch.zeros_like(parameter, dtype=_kept_dtype(parameter))
            for name, parameter in self._parameters_of("cumulative").items()
        }

    def deal(self, costs: dict[str, float]) -> dict[tuple[str, str], int]:
        """Deals the families separately; what is kept for a parameter is kept by one rank."""
        groups = sharing_parameters(self.map)
        work: dict[tuple[str, str], float] = {("gradient", projection): value for projection, value in costs.items()}
        for family in ("cumulative", "update"):
            for projection, value in costs.items():
                work[family, groups[projection]] = work.get((family, groups[projection]), 0.0) + value
        dealt = deal(work, self.shards.ranks)
        units = {"gradient": {projection: projection for projection in costs}, "cumulative": groups, "update": groups}
        return {
            (family, projection): dealt[family, unit]
            for family, projections in units.items()
            for projection, unit in projections.items()
        }

    def _parameters_of(self, family: str) -> dict[str, torch.nn.Parameter]:
        """Returns the parameters for which this rank keeps W0 (``update``) or the sum of gradients (``cumulative``)."""
        owners = self._parameter_owners(family)
        return {name: p for name, p in self.parameters.items() if owners[name] == self.shards.rank}

    def _parameter_owners(self, family: str) -> dict[str, int]:
        return {
            matrix.parameter: self.owners[family, projection]
            for projection, layers in self.map.projections.items()
            for matrix in layers
        }

    def every_step(self, optimizer: Optimizer) -> None:
        """Adds the gradients that this optimizer steps on to the cumulative ones."""
        stepped = self._stepped_by(optimizer)
        gradients = {name: p.grad for name, p in stepped.items() if p.grad is not None and name in self._cumulative}
        if gradients:
            torch._foreach_add_([self._cumulative[name] for name in gradients], list(gradients.values()))

    def measure(self, trainer: Trainer, full: bool, final: bool) -> None:
        """Measures the gradient at W_s, the sum of gradients up to it, and W_s - W0."""
        started = time.perf_counter()
        for rows in self._rows.values():
            rows.begin()
        gradients = {} if final else self._gradients()
        for projection, layers in self.map.projections.items():
            if all(matrix.parameter in gradients for matrix in layers) and self.owns(projection, "gradient"):
                self.guarded(trainer, partial(self._measure_gradient, projection, gradients, full))
            if trainer.global_step == 0 and not final:
                continue  # W0 - W0 has no direction, and the sum of one gradient is that gradient
            if self.owns(projection, "cumulative"):
                self.guarded(trainer, partial(self._measure_cumulative, projection, full, final))
            if self.owns(projection, "update"):
                self.guarded(trainer, partial(self._measure_update, projection, full, final))
        self.record(trainer, list(self._rows.values()), started, headline=("coherence", self._rows["gradient"]))

    def _measure_gradient(self, projection: str, gradients: dict[str, Tensor], full: bool) -> None:
        self._rows["gradient"].measure(projection, self.map.gather(projection, gradients), full)

    def _measure_cumulative(self, projection: str, full: bool, final: bool) -> None:
        cumulative = self.map.gather(projection, self._cumulative)
        self._rows["cumulative"].measure(projection, cumulative, full, keep_start=not final)
        if full:
            weights = self.map.gather(projection, self.parameters)
            stacks = zip(stacks_of_one_shape(weights), stacks_of_one_shape(cumulative), strict=True)
            values = torch.cat([leading_alignment(w, c) for w, c in stacks])
            self._rows["weight"].add(projection, {"cumulative_alignment": values})

    def _measure_update(self, projection: str, full: bool, final: bool) -> None:
        initial = self.map.gather(projection, self._initial)
        updates = [w - w0 for w, w0 in zip(self.map.gather(projection, self.parameters), initial, strict=True)]
        self._rows["update"].measure(projection, updates, full, keep_start=not final)
        self._rows["update"].add(projection, {"relative_norm": relative_norm(updates, initial)})

    def _stepped_by(self, optimizer: Optimizer) -> dict[str, torch.nn.Parameter]:
        if id(optimizer) not in self._owned:
            theirs = {id(p) for group in optimizer.param_groups for p in group["params"]}
            self._owned[id(optimizer)] = {name: p for name, p in self.parameters.items() if id(p) in theirs}
        return self._owned[id(optimizer)]

    def _gradients(self) -> dict[str, Tensor]:
        """Returns parameter -> gradient, without parameters that have none (frozen, or not used in this step)."""
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}

    def state_dict(self) -> dict[str, Any]:
        """Returns W0, the cumulative gradients and the warm starts of all ranks: tensors only.

        On several ranks, rank 0 gets the whole, for it writes the checkpoint; the others return what they keep.
        """
        starts = {family: self.whole(rows.state_dict()) for family, rows in self._rows.items()}
        if self.shards.ranks == 1:
            return {"initial": self._initial, "cumulative": self._cumulative, "starts": starts}
        return {
            "initial": self.shards.bring(self._initial, self._parameter_owners("update")),
            "cumulative": self.shards.bring(self._cumulative, self._parameter_owners("cumulative")),
            "starts": starts,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the state of a checkpoint."""
        super().load_state_dict(state_dict)
        self._initial, self._cumulative = dict(state_dict["initial"]), dict(state_dict["cumulative"])
        for family, starts in state_dict["starts"].items():
            self._rows[family].load_state_dict(starts)


def _kept_dtype(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


def _all_rows() -> dict[str, ContinuityRows]:
    return {family: ContinuityRows(family, warm=family != "gradient") for family in FAMILIES}
