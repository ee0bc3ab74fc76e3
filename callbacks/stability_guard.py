"""StabilityGuard: says which layer and head leave their bounds first, and keeps a checkpoint from before."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from callbacks.cadence import Cadence
from callbacks.collector import Collector, Row
from callbacks.measuring import Patterns, RowCallback
from callbacks.softmax_saturation import NOTHING_SEEN, SoftmaxSaturation
from callbacks.spectral_dynamics import SpectralDynamics
from geocont.errors import UserError

FILE = "guard.jsonl"
CHECKPOINT = "healthy.ckpt"
CANDIDATE = ".healthy.candidate.ckpt"


@dataclass(frozen=True)
class Crossing:
    """A value beyond its bound.

    Attributes:
        cause: ``max_logit``, ``saturated``, ``sigma_max``, ``loss`` or ``gradient``.
        value: NaN and infinity as text, so that every reader of JSON takes it.
        bound: The largest value that is allowed; ``finite`` of loss and gradient.
        layer: Number of the layer, counted from 0.
        head: Number of the head in its layer.
        place: The projection, the parameter, or the rank.
    """

    cause: str
    value: float | str
    bound: float | str
    layer: int | None = None
    head: int | None = None
    place: str | None = None

    @property
    def key(self) -> str:
        """What tells one crossing from another."""
        return "/".join(str(part) for part in (self.cause, self.place, self.layer, self.head))


class StabilityGuard(RowCallback):
    """Watches for attention and weights that run away, and names the first layer and head that does.

    An event is a value beyond its bound. Each layer and head is reported once for each cause; what crosses at the same
    step for the same cause is one event. It is one line on the terminal, one in ``guard.jsonl`` of the run's directory,
    an alert in W&B, and ``guard/events`` (their number so far) and ``guard/first_step`` in the rows.

    The guard reads what SoftmaxSaturation and SpectralDynamics measure, at their steps. Where one of them is needed and
    missing, it adds its own, at ``every_n_steps`` (which then logs its keys as well). The loss is looked at in every
    step; on a GPU that waits for it.

    ``healthy.ckpt`` is a state in which all was within bounds, and no step had been beyond them before. It can be
    resumed from.

    Args:
        max_logit: Largest attention score allowed in any head, scale included. Scores of healthy models stay well below
            100, where QK-Clip (arXiv:2507.20534) steps in.
        saturated: Largest share of query rows allowed in any head with a top probability above 0.99. Heads that attend
            to the first token do so for many rows in healthy models.
        sigma_max: Largest singular value allowed of any matrix; not watched by default.
        loss: Whether to watch for a loss that is not finite.
        action: What to do beyond reporting. ``warn``: nothing. ``stop``: end the training after this step, without the
            update if the loss is not finite. ``skip``: leave out every update with a loss or gradients that are not
            finite, and count them as ``guard/skipped_steps``; other causes are reported only.
        every_n_steps: Log ``guard/events`` every so many optimizer steps, and measure if nothing else does.
        checkpoint_every_n_steps: Save ``healthy.ckpt`` at most every so many optimizer steps; null saves none.
        dirpath: Folder of ``healthy.ckpt``; by default ``checkpoints`` in the run's directory.
        weights: Projection -> regular expression of parameter names, for ``sigma_max``. By default the module's own
            ``weight_map()``.
    """

    def __init__(
        self,
        max_logit: float | None = 100.0,
        saturated: float | None = 0.9,
        sigma_max: float | None = None,
        loss: bool = True,
        action: Literal["warn", "stop", "skip"] = "warn",
        every_n_steps: int = 50,
        checkpoint_every_n_steps: int | None = 200,
        dirpath: str | None = None,
        weights: Patterns | None = None,
    ) -> None:
        super().__init__(Cadence(every_n_steps, log_spaced=False))
        if action not in ("warn", "stop", "skip"):
            raise UserError(f"stability_guard.action must be warn, stop or skip, got {action!r}")
        for key, bound in (("max_logit", max_logit), ("saturated", saturated), ("sigma_max", sigma_max)):
            if bound is not None and not bound > 0:
                raise UserError(f"stability_guard.{key} must be above 0, got {bound!r}")
        if checkpoint_every_n_steps is not None and checkpoint_every_n_steps < 1:
            raise UserError(f"checkpoint_every_n_steps must be at least 1, got {checkpoint_every_n_steps!r}")
        self.max_logit, self.saturated, self.sigma_max, self.loss = max_logit, saturated, sigma_max, loss
        self.action, self.checkpoint_every_n_steps = action, checkpoint_every_n_steps
        self.dirpath, self.weights = dirpath, weights
        self.events: list[dict[str, Any]] = []
        self.skipped_steps = 0
        self._seen: set[str] = set()  # crossings that have been reported
        self._causes: set[str] = set()  # what has been measured at some step
        self._restored = False
        self._saved_step: int | None = None  # of the newest candidate
        self._candidate = False  # whether a saved state waits for its proof of health
        self._bad_loss: Tensor | None = None  # of the batches of this update: whether one is not finite
        self._last_loss: Tensor | None = None

    @property
    def first_step(self) -> int | None:
        """Step of the first event."""
        return self.events[0]["step"] if self.events else None

    # -- joining ----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Puts the measurements that it needs and that nobody brings beside itself."""
        if stage != "fit":
            return
        needed: list[RowCallback] = []
        if (self.max_logit is not None or self.saturated is not None) and not _has(trainer, SoftmaxSaturation):
            probe = SoftmaxSaturation(self.cadence.every_n_steps, log_spaced=False)
            probe._warned.add(NOTHING_SEEN)  # a model without attention has nothing to guard there
            needed.append(probe)
        if self.sigma_max is not None and not _has(trainer, SpectralDynamics):
            needed.append(SpectralDynamics(self.cadence.every_n_steps, weights=self.weights))
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        here = callbacks.index(self) + 1
        callbacks[here:here] = needed  # Lightning comes to them next

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Joins the trainer's collector; forgets an earlier training, unless a checkpoint brought its state."""
        super().on_train_start(trainer, pl_module)
        Collector.of(trainer).join_guard(self)
        if not self._restored:
            self.events, self._seen, self.skipped_steps, self._saved_step = [], set(), 0, None
            self._causes = set()
        self._restored, self._candidate, self._bad_loss = False, False, None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves the initial state, which the first measurement then may prove healthy.

        (All callbacks have started by now, and no batch has been taken yet.)
        """
        if self._saved_step is None and trainer.ckpt_path is None:
            self._save(trainer)

    # -- looking ----------------------------------------------------------------------------------------------------

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Notes whether the loss of this batch is finite, without waiting for it."""
        if self.loss:
            bad = ~torch.isfinite(loss.detach()).all()
            self._bad_loss = bad if self._bad_loss is None else self._bad_loss | bad
            self._last_loss = loss.detach()

    def fire(self, trainer: Trainer, optimizer: Optimizer, full: bool) -> None:
        """Logs the events so far."""
        Collector.of(trainer).add(trainer, self._metrics())

    def examine_update(self, trainer: Trainer, optimizer: Optimizer) -> None:
        """Looks at the loss, and with ``skip`` at the gradients, before anything is measured; alike on all ranks."""
        if not self.loss:
            return
        found: list[Crossing] = []
        self.guarded(trainer, lambda: found.extend(self._not_finite(trainer, optimizer)))
        self._bad_loss = None
        if not _any_rank(trainer, bool(found)):
            return
        found = [crossing for part in self.exchange(trainer, lambda: found) for crossing in part]
        self._report(trainer, trainer.global_step, found)
        if self.action in ("skip", "stop"):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None  # which optimizers leave alone
            self.skipped_steps += 1
        Collector.of(trainer).add(trainer, self._metrics())

    def examine_row(self, trainer: Trainer, step: int, row: Row | None) -> None:
        """Compares what was measured at a step with the bounds; alike on all ranks."""
        parts = self.exchange(trainer, lambda: self._measured(row))
        found = {crossing.key: crossing for _, part in parts for crossing in part}
        measured = {cause for causes, _ in parts for cause in causes}
        self._report(trainer, step, found.values())
        Collector.of(trainer).add(trainer, self._metrics(), step=step)
        self._causes |= measured
        if measured == self._causes and not self.events:
            self._keep_healthy(trainer, step)

    def _measured(self, row: Row | None) -> tuple[set[str], list[Crossing]]:
        """Returns the causes that a row tells of, and what is beyond its bound."""
        if row is None:
            return set(), []
        sigma = any(key.startswith("spectrum/sigma_max/") for key in row.metrics)
        heads = {name for name in ("max_logit", "saturated") if f"softmax/{name}/heads" in row.arrays}
        return heads | ({"sigma_max"} if sigma else set()), list(self._beyond(row))

    def _not_finite(self, trainer: Trainer, optimizer: Optimizer) -> Iterable[Crossing]:
        if self._bad_loss is not None and bool(self._bad_loss):
            place = f"rank {self.shards.rank}" if self.shards.ranks > 1 else None
            value = float(self._last_loss.mean()) if self._last_loss is not None else math.nan
            yield Crossing("loss", str(value), "finite", place=place)
        # (A gradient scaler has its own way with gradients that overflow, and they are nothing unusual there.)
        elif self.action == "skip" and getattr(trainer.precision_plugin, "scaler", None) is None:
            named = {id(p): name for name, p in trainer.lightning_module.named_parameters()}
            held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            if held and not bool(torch.isfinite(torch.nn.utils.get_total_norm([p.grad for p in held]))):
                bad = next((p for p in held if not bool(torch.isfinite(p.grad).all())), held[0])
                yield Crossing("gradient", "not finite", "finite", place=named.get(id(bad)))

    def _beyond(self, row: Row) -> Iterable[Crossing]:
        for name, bound in (("max_logit", self.max_logit), ("saturated", self.saturated)):
            heads = row.arrays.get(f"softmax/{name}/heads")
            if heads is None or bound is None:
                continue
            for layer, head in (heads > bound).nonzero().tolist():
                yield Crossing(name, float(heads[layer, head]), bound, layer, head)
        for key, value in row.metrics.items() if self.sigma_max is not None else ():
            if key.startswith("spectrum/sigma_max/") and value > self.sigma_max:  # type: ignore[operator]
                *_, projection, layer = key.split("/")
                yield Crossing("sigma_max", value, self.sigma_max, int(layer.removeprefix("layer_")), place=projection)  # type: ignore[arg-type]

    # -- telling ----------------------------------------------------------------------------------------------------

    def _report(self, trainer: Trainer, step: int, found: Iterable[Crossing]) -> None:
        """Makes one event of the new crossings of each cause."""
        causes: dict[str, list[Crossing]] = {}
        for crossing in found:
            if _once(crossing) not in self._seen:
                self._seen.add(_once(crossing))
                causes.setdefault(crossing.cause, []).append(crossing)
        for crossings in causes.values():
            first = min(crossings, key=_first)
            event = {"step": step, **asdict(first), "others": [each.key for each in crossings if each is not first]}
            self.events.append(event)
            text = _text(event)
            rank_zero_warn(text)
            if trainer.is_global_zero:
                self.guarded(trainer, lambda event=event, text=text: _write(trainer, event, text))  # type: ignore[misc]
        if causes and self.action == "stop":
            trainer.should_stop = True

    def _metrics(self) -> dict[str, float]:
        metrics = {"guard/events": float(len(self.events))}
        if self.first_step is not None:
            metrics["guard/first_step"] = float(self.first_step)
        if self.action == "skip":
            metrics["guard/skipped_steps"] = float(self.skipped_steps)
        return metrics

    # -- keeping ----------------------------------------------------------------------------------------------------

    def _keep_healthy(self, trainer: Trainer, step: int) -> None:
        """Makes the state that was saved last ``healthy.ckpt``, now that a look at all causes has found nothing.

        W_s is saved at the end of step s - 1, before anything is known of it, so it waits for the next look.
        """
        if self._candidate and self._saved_step is not None and step >= self._saved_step:
            self._candidate = False
            if trainer.is_global_zero:
                self.guarded(trainer, lambda: os.replace(self._folder(trainer) / CANDIDATE, self._file(trainer)))

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Looks at the row, hands it on, and saves the state from time to time while all is well."""
        super().on_train_batch_end(trainer, *args)
        every, saved = self.checkpoint_every_n_steps, self._saved_step
        if every and not self.events and not self._candidate and trainer.global_step >= (saved or 0) + every:
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        if self.checkpoint_every_n_steps is None or trainer.fast_dev_run or self.events:  # type: ignore[attr-defined]
            return
        self._saved_step, self._candidate = trainer.global_step, True
        trainer.save_checkpoint(self._folder(trainer) / CANDIDATE)  # on every rank

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leaves no state behind that was not proved healthy."""
        if self._candidate and trainer.is_global_zero:
            (self._folder(trainer) / CANDIDATE).unlink(missing_ok=True)
        self._candidate = False

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Writes what was measured before a run broke off, and leaves no state that was not proved healthy."""
        super().on_exception(trainer, pl_module, exception)
        with suppress(OSError):
            self.on_train_end(trainer, pl_module)

    def _folder(self, trainer: Trainer) -> Path:
        return Path(self.dirpath or Path(trainer.default_root_dir) / "checkpoints")

    def _file(self, trainer: Trainer) -> Path:
        return self._folder(trainer) / CHECKPOINT

    def state_dict(self) -> dict[str, Any]:
        """Returns the events and what has been reported: plain values only."""
        return {
            "events": self.events,
            "seen": sorted(self._seen),
            "causes": sorted(self._causes),
            "skipped_steps": self.skipped_steps,
            "saved_step": self._saved_step,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the state of a checkpoint."""
        self.events, self._seen = list(state_dict["events"]), set(state_dict["seen"])
        self._causes = set(state_dict["causes"])
        self.skipped_steps, self._saved_step = state_dict["skipped_steps"], state_dict["saved_step"]
        self._restored = True


def _has(trainer: Trainer, kind: type) -> bool:
    return any(isinstance(callback, kind) for callback in trainer.callbacks)  # type: ignore[attr-defined]


def _any_rank(trainer: Trainer, here: bool) -> bool:
    """Tells every rank whether something is so on any of them."""
    return trainer.strategy.reduce_boolean_decision(here, all=False) if trainer.world_size > 1 else here


def _once(crossing: Crossing) -> str:
    """Returns what is reported once: a loss or a gradient that is not finite whatever its rank or parameter."""
    return crossing.cause if crossing.bound == "finite" else crossing.key


def _first(crossing: Crossing) -> tuple[float, float]:
    """Orders crossings by layer, the worst head of a layer first."""
    worst = -crossing.value if isinstance(crossing.value, float) else 0.0
    return (-1 if crossing.layer is None else crossing.layer, worst)


def _text(event: dict[str, Any]) -> str:
    """Returns an event as a line."""
    what = {"loss": "the loss", "gradient": "a gradient"}.get(event["cause"], event["cause"])
    names = ("layer", "head")
    place = [f"{name} {event[name]}" for name in names if event[name] is not None]
    place += [event["place"]] if event["place"] else []
    value = event["value"]
    shown = f"{value:.4g} (bound {event['bound']:g})" if isinstance(value, float) else value
    others = f", and {len(event['others'])} more" if event["others"] else ""
    return f"StabilityGuard: step {event['step']}: {what} is {shown}" + (
        f" in {', '.join(place)}{others}" if place else ""
    )


def _write(trainer: Trainer, event: dict[str, Any], text: str) -> None:
    """Adds an event to the run's directory and to W&B, where there are such."""
    for logger in trainer.loggers:
        if hasattr(logger, "log_arrays") and logger.save_dir is not None:  # the run's local store
            with (Path(logger.save_dir) / FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")
        if isinstance(logger, WandbLogger) and logger.experiment:
            logger.experiment.alert(title=f"guard: {event['cause']}", text=text)
