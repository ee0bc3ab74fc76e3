"""SoftmaxSaturation: how close attention is to one-hot, layer by layer, while a model trains."""

from __future__ import annotations

import math
import time
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric

from callbacks.attention_watch import AttentionWatch, Layer
from callbacks.cadence import Cadence
from callbacks.collector import Collector
from callbacks.fixed_forward import FixedForward
from callbacks.measuring import Patterns, RowCallback, find_weights
from geocont.errors import UserError
from geocont.measures.attention import TOTALS, head_values, logit_scale, merge_totals, summarise_heads
from geocont.weights import WeightMap, canonical_name

NOTHING_SEEN = (
    "SoftmaxSaturation saw no call of scaled_dot_product_attention, so it logs nothing; attention that is written out"
    " or fused (FlexAttention, flash_attn) cannot be watched"
)
NOT_REPEATABLE = (
    "SoftmaxSaturation cannot run the forward pass of a fixed batch again, because this training_step computes the"
    " inputs of its attention itself; it watches the current batches instead (probe: current)"
)


class SaturationTotals(Metric):
    """Totals of each layer and head over batches and ranks.

    The state is a table with a line for each layer and head seen, (layer, head, \\*totals). Ranks' tables are joined
    and then summed (``max_logit``: maximised), so that a rank that saw fewer layers, or none, still takes part.
    """

    full_state_update = False
    table: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("table", default=[], dist_reduce_fx="cat")

    def update(self, layers: list[Layer]) -> None:
        """Adds what a watch has seen."""
        lines = [torch.zeros(0, 2 + len(TOTALS), device=self.device)]
        for number, layer in enumerate(layers):
            for totals in layer.totals:
                heads = torch.arange(len(totals), device=self.device, dtype=torch.float32)
                place = torch.stack([torch.full_like(heads, number), heads], 1)
                lines.append(torch.cat([place, totals.to(self.device, torch.float32)], 1))
        self.table.append(torch.cat(lines))

    def compute(self) -> list[Tensor]:
        """Returns the totals ``(H, 7)`` of each layer, over all ranks."""
        table = (torch.cat(self.table) if isinstance(self.table, list) else self.table).cpu()
        places = table[:, :2].long()
        layers = []
        for number in range(int(places[:, 0].max()) + 1 if len(table) else 0):
            of_layer = places[:, 0] == number
            heads = int(places[of_layer, 1].max()) + 1 if bool(of_layer.any()) else 0
            seats = [table[of_layer & (places[:, 1] == head), 2:] for head in range(heads)]
            layers.append(torch.stack([merge_totals(seat) for seat in seats]) if seats else torch.zeros(0, len(TOTALS)))
        return layers


class SoftmaxSaturation(RowCallback):
    """Logs ``softmax/{measure}/{layer_00, layer_01, .., mean, worst_head}``, the saturation of softmax attention.

    Measures are ``max_logit``, ``entropy``, ``top_probability``, ``saturated``, ``jacobian`` (see
    :mod:`geocont.measures.attention`), and ``logit_scale`` where the q and k matrices are known. A layer's value is the
    mean over its heads (of ``max_logit`` the largest), ``mean`` that over layers, ``worst_head`` the largest value of
    all layers and heads, for ``entropy`` and ``jacobian`` the smallest. The values of each head go to the run's local
    store as ``softmax/{measure}/heads``.

    It watches every call of ``scaled_dot_product_attention`` (and ``nn.MultiheadAttention``) in the forward passes of a
    measured step, all accumulated batches and all ranks together, without a change to the model or its results. Layers
    are numbered by the order of these calls; a step that runs a network twice has twice as many. A compiled model runs
    eagerly in forward passes that are watched; a frozen ``nn.MultiheadAttention`` in eval mode leaves its fast path.

    With ``probe: fixed`` the first training batch is kept, on its device, and run again through the modules that the
    training step called, in eval mode (so without dropout) and without gradients: values then change with the weights
    only. It costs a forward pass for each measured step. A resumed run takes the first batch that it sees.

    Args:
        every_n_steps: Measure every so many optimizer steps.
        log_spaced: Measure at steps 1, 2, 4, 8 ... below ``every_n_steps`` too, for early dynamics.
        rows: Measure at most so many query rows of a sequence, evenly spaced, the last one among them.
        sequences: Measure at most so many sequences of a batch (on each rank), the first ones.
        weights: ``{q: .., k: ..}``, projection -> regular expression of parameter names, for ``logit_scale``. By
            default the module's own ``weight_map()``, if it has one.
        probe: ``current``, the batches of the measured step, or ``fixed``, the first training batch.
    """

    def __init__(
        self,
        every_n_steps: int = 50,
        log_spaced: bool = True,
        rows: int = 64,
        sequences: int = 4,
        weights: Patterns | None = None,
        probe: Literal["current", "fixed"] = "current",
    ) -> None:
        super().__init__(Cadence(every_n_steps, log_spaced))
        for key, value in (("rows", rows), ("sequences", sequences)):
            if not isinstance(value, int) or value < 1:
                raise UserError(f"{key} must be a whole number of at least 1, got {value!r}")
        if probe not in ("current", "fixed"):
            raise UserError(f"probe must be current or fixed, got {probe!r}")
        self.weights, self.probe = weights, probe
        self._watch = AttentionWatch(rows, sequences)
        self._totals = SaturationTotals()
        self._watched_step = -1  # the optimizer step whose forward passes are (being) watched
        self._fixed: FixedForward | None = None  # the first batch, once it is seen
        self._map: WeightMap | None = None
        self._parameters: dict[str, torch.nn.Parameter] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Finds the q and k matrices, so that a pattern which does not fit is reported before training starts."""
        if stage == "fit" and (self.weights is not None or callable(getattr(pl_module, "weight_map", None))):
            self._map = find_weights(pl_module, self.weights, type(self).__name__)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Joins the trainer's collector and looks the parameters up, once."""
        super().on_train_start(trainer, pl_module)
        self._watched_step, self._fixed = -1, None
        self._totals.to(pl_module.device)
        wanted = set(self._map.parameters) if self._map is not None else set()
        named = ((canonical_name(name), parameter) for name, parameter in pl_module.named_parameters())
        self._parameters = {name: parameter for name, parameter in named if name in wanted}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Watches the forward pass of this batch if the optimizer step it belongs to is measured."""
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        step, first = trainer.global_step, self.probe == "fixed" and self._fixed is None
        if not self.cadence.fires(step) and not first:
            return
        if step != self._watched_step:
            self._watched_step = step
            self._watch.reset()
        if first:
            self._fixed = recorder = FixedForward(lambda: self._watch.calls)
            self.guarded(trainer, lambda: recorder.record(pl_module))
        if first or not self._repeats():
            self.guarded(trainer, self._watch.start)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Ends watching: what a backward pass computes again has been seen."""
        self._stop()

    def fire(self, trainer: Trainer, optimizer: Optimizer, full: bool) -> None:
        """Sums over batches and ranks, and hands the values to the collector."""
        self._stop()
        if self._watched_step != trainer.global_step:
            return  # one of several steps within a batch
        started, watch = time.perf_counter(), self._watch
        if self._repeats():
            watch.reset()
            self.guarded(trainer, lambda: self._run_fixed(trainer))
        else:
            started -= watch.seconds  # in the forward passes
            if self._fixed is not None and watch.layers:
                self._warn_once(NOT_REPEATABLE, NOT_REPEATABLE)
        self._totals.reset()
        self.guarded(trainer, lambda: self._totals.update(watch.layers))
        self._totals.update([])  # what could not be added counts as not seen
        totals = self._totals.compute()  # every rank gets here, whatever it has seen
        for reason in watch.failures:
            self._warn_once(f"SoftmaxSaturation could not measure step {trainer.global_step}, {reason}", reason)
        if not totals:
            if not watch.failures:
                self._warn_once(NOTHING_SEEN, NOTHING_SEEN)
            return
        of_layers = [head_values(layer) for layer in totals]
        values = {name: [layer[name] for layer in of_layers] for name in of_layers[0]}
        # Every rank gets here too. One that has seen no layer, as others have, takes the scales from them.
        parts = self.exchange(trainer, lambda: (self._logit_scales(watch.layers), time.perf_counter() - started))
        scales = next((scales for scales, _ in parts if scales), [])
        if scales:
            values["logit_scale"] = scales
        metrics = {f"softmax/{key}": value for key, value in summarise_heads(values).items()}
        worst = metrics.get("softmax/max_logit/worst_head")
        Collector.of(trainer).add(
            trainer,
            metrics,
            headline={} if worst is None else {"max_logit": worst},
            arrays={f"softmax/{name}/heads": _padded(layers) for name, layers in values.items()},
            skipped=int(sum(layer[:, TOTALS.index("skipped")].sum().item() for layer in totals)),
            milliseconds=1e3 * max((seconds for _, seconds in parts), default=0.0),
        )

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Ends watching where there was no backward pass, and hands the row to the loggers."""
        self._stop()
        super().on_train_batch_end(trainer, *args)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends watching where a hook has skipped the batch."""
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Ends watching, and writes what was measured before a run broke off."""
        self._stop()
        super().on_exception(trainer, pl_module, exception)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Ends watching, and writes what is left."""
        self._stop()
        super().teardown(trainer, pl_module, stage)

    def _stop(self) -> None:
        self._watch.stop()
        if self._fixed is not None:
            self._fixed.stop()

    def _repeats(self) -> bool:
        return self._fixed is not None and self._fixed.repeatable

    def _run_fixed(self, trainer: Trainer) -> None:
        assert self._fixed is not None
        self._watch.start()
        try:
            self._fixed.run(trainer)
        finally:
            self._watch.stop()

    def _logit_scales(self, layers: list[Layer]) -> list[Tensor]:
        """Returns ``logit_scale`` of the heads of each layer; nothing where q and k do not match the layers seen."""
        if self._map is None or not {"q", "k"} <= self._map.projections.keys():
            return []
        wq, wk = (self._map.gather(projection, self._parameters) for projection in ("q", "k"))
        if not len(wq) == len(wk) == len(layers):
            return []
        fits = all(
            len(q) == layer.heads * layer.head_dim and len(k) == layer.key_heads * layer.head_dim
            for q, k, layer in zip(wq, wk, layers, strict=True)
        )
        if not fits:
            return []
        pairs = zip(wq, wk, layers, strict=True)
        return [logit_scale(q, k, layer.heads, layer.key_heads).cpu() for q, k, layer in pairs]

    def _warn_once(self, message: str, reason: str) -> None:
        if reason not in self._warned:
            self._warned.add(reason)
            rank_zero_warn(message)


def _padded(layers: list[Tensor]) -> Tensor:
    """Stacks the values of each layer's heads, ``(L, H)``; NaN where a layer has fewer heads."""
    most = max(len(heads) for heads in layers)
    pad = [torch.nn.functional.pad(heads.float(), (0, most - len(heads)), value=math.nan) for heads in layers]
    return torch.stack(pad)
