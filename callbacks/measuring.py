"""What all measuring callbacks share: when they fire, which matrices they look at, and that they never harm a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer

from callbacks.cadence import Cadence
from callbacks.collector import Collector
from callbacks.continuity_rows import ContinuityRows
from callbacks.shards import ExchangeError, Shards, cost, deal
from geocont.errors import UserError
from geocont.weights import WeightMap, WeightPattern, canonical_name

Patterns = dict[str, str | WeightPattern]
T = TypeVar("T")


class RowCallback(Callback):
    """Base of the callbacks that add values to the collector's row at the firings of a cadence.

    A subclass implements :meth:`fire`, called under ``no_grad`` with the state before the update of a step: weights W_s
    and the gradients at W_s (reduced over ranks, unscaled, not clipped), once for each optimizer step that fires.

    Args:
        cadence: When to fire.
    """

    def __init__(self, cadence: Cadence) -> None:
        super().__init__()
        self.cadence = cadence
        self.shards = Shards()  # the ranks of the training that runs; one before it starts
        self._last_step = -1  # never twice for one step
        self._warned: set[str] = set()
        self._unsaid: list[str] = []  # what failed on this rank, until an exchange brings it to the terminal of rank 0

    def fire(self, trainer: Trainer, optimizer: Optimizer, full: bool) -> None:
        """Measures the current state and hands the values to the collector; ``full`` asks for the full table."""
        raise NotImplementedError

    def every_step(self, optimizer: Optimizer) -> None:
        """Does what must be done at every step of an optimizer, fired or not (accumulating gradients)."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Joins the trainer's collector."""
        Collector.of(trainer).join(self)
        self.shards = Shards.current()
        self._last_step = -1

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Has Lightning write a row for this step if anything fires."""
        Collector.of(trainer).open_step(trainer)

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Fires before update s + 1, where the gradient at W_s is complete."""
        step = trainer.global_step
        if step == self._last_step:
            return  # an optimizer that evaluates its closure again
        self._last_step = step
        self.guarded(trainer, lambda: Collector.of(trainer).open_update(trainer, optimizer))
        self.guarded(trainer, lambda: self.every_step(optimizer))
        if self.cadence.fires(step):
            self.guarded(trainer, lambda: self.fire(trainer, optimizer, self.cadence.is_full(step)))

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Hands the row to the loggers before Lightning completes it with the losses of this step."""
        self.guarded(trainer, lambda: Collector.of(trainer).examine(trainer))
        self.guarded(trainer, lambda: Collector.of(trainer).flush(trainer))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Writes what was measured before a run broke off."""
        self.guarded(trainer, lambda: Collector.of(trainer).close(trainer))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Writes what is left and gives the trainer its logging cadence back."""
        if stage == "fit":
            self.guarded(trainer, lambda: Collector.of(trainer).close(trainer))

    def guarded(self, trainer: Trainer, work: Callable[[], None]) -> None:
        """Runs a measurement; whatever goes wrong in it is said once and does not end the training."""
        try:
            work()
        except ExchangeError:
            raise  # a rank is gone: nothing goes on without it
        except Exception as error:  # a failed measurement never kills a run
            self._say(f"{type(error).__name__}: {error}", trainer.global_step)

    def exchange(self, trainer: Trainer, work: Callable[[], T]) -> list[T]:
        """Runs this rank's part of a measurement and returns the parts of all ranks, in order of rank, on every rank.

        Every rank has to get here. A part that failed is missing from the result, and rank 0 says why.
        """
        parts: list[T] = []
        self.guarded(trainer, lambda: parts.append(work()))
        found: list[T] = []
        for own, unsaid in self.shards.gather((parts, self._unsaid)):
            found += own
            for reason in unsaid:
                self._say(reason, trainer.global_step, travel=False)
        self._unsaid = []
        return found

    def _say(self, reason: str, step: int, travel: bool = True) -> None:
        if reason not in self._warned:
            self._warned.add(reason)
            rank_zero_warn(f"{type(self).__name__} could not measure step {step}: {reason}")
            if travel and self.shards.rank != 0:
                self._unsaid.append(reason)


class MeasuringCallback(RowCallback):
    """Base of the callbacks that measure matrices, found through a :class:`~geocont.weights.WeightMap`.

    A subclass implements :meth:`measure`. Of several ranks each measures what :attr:`owners` gives it, and every rank
    gets all values in one exchange.

    Args:
        every_n_steps: Measure every so many optimizer steps.
        log_spaced: Measure at steps 1, 2, 4, 8 ... below ``every_n_steps`` too, for early dynamics.
        full_every_n_firings: Compute the full table at every so manieth regular firing (and at log-spaced ones).
        weights: Projection -> regular expression of parameter names (or a :class:`~geocont.weights.WeightPattern`).
            By default the module's own ``weight_map()``.
    """

    def __init__(
        self, every_n_steps: int, log_spaced: bool, full_every_n_firings: int, weights: Patterns | None
    ) -> None:
        super().__init__(Cadence(every_n_steps, log_spaced, full_every_n_firings))
        self.weights = weights
        # Asked for at every hook of every step, so made once. It tells instances with different settings apart, so that
        # each gets its own state back.
        patterns = None if weights is None else {name: str(pattern) for name, pattern in weights.items()}
        self._state_key = self._generate_state_key(weights=patterns, cadence=str(self.cadence))
        self.parameters: dict[str, torch.nn.Parameter] = {}  # name -> parameter that holds a mapped matrix
        self.owners: dict[tuple[str, str], int] = {}  # (family, projection) -> the rank that measures it
        self._map: WeightMap | None = None
        self._restored = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the state of a checkpoint; a subclass with state calls this too."""
        self._restored = True
        self.shards = Shards()  # a checkpoint's state is whole, on every rank, until the work is dealt

    def restored(self) -> bool:
        """Tells, once, whether the training that starts continues from a checkpoint."""
        restored, self._restored = self._restored, False
        return restored

    def measure(self, trainer: Trainer, full: bool, final: bool) -> None:
        """Measures the current state of ``self.parameters`` and hands the values to :meth:`record`.

        Args:
            trainer: The running trainer.
            full: Whether this firing computes the full table.
            final: True after the last update, when there is no gradient.
        """
        raise NotImplementedError

    def whole(self, starts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the warm starts of all ranks, for a checkpoint, which every rank has Lightning make together."""
        if self.shards.ranks == 1:
            return starts
        parts = self.shards.gather({key: start.cpu() for key, start in starts.items()})
        return {key: start for part in parts for key, start in part.items()}

    @property
    def state_key(self) -> str:
        """Key of this instance's state in checkpoints."""
        return self._state_key

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Takes the state of the same callback at another cadence, where a resumed run has changed that."""
        states = checkpoint.get("callbacks", {})
        same = self._state_key.split("'cadence'")[0]
        found = [key for key in states if key.startswith(same)]
        if found and self._state_key not in states:
            self.load_state_dict(states[found[0]])

    @property
    def map(self) -> WeightMap:
        """The matrices that this callback looks at; found in ``setup``."""
        assert self._map is not None, "the callback was used before Lightning called its setup()"
        return self._map

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Finds the matrices, so that a pattern which does not fit is reported before training starts."""
        if stage == "fit":
            self._map = find_weights(pl_module, self.weights, type(self).__name__)
            for projection, layers in self._map.projections.items():
                if len(layers) == 1:
                    rank_zero_warn(f"{type(self).__name__}: {projection} has one matrix, so no pair to compare")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Joins the trainer's collector and looks the parameters up, once."""
        super().on_train_start(trainer, pl_module)
        wanted = set(self.map.parameters)
        named = ((canonical_name(name), parameter) for name, parameter in pl_module.named_parameters())
        self.parameters = {name: parameter for name, parameter in named if name in wanted}
        costs = {name: cost(layers, self.parameters) for name, layers in self.map.projections.items()}
        self.owners = self.deal(costs)

    def deal(self, costs: dict[str, float]) -> dict[tuple[str, str], int]:
        """Returns which rank measures which projection of which family; by default there is one family, ``""``.

        Args:
            costs: Projection -> about how dear its measures are.
        """
        return {("", projection): rank for projection, rank in deal(costs, self.shards.ranks).items()}

    def owns(self, projection: str, family: str = "") -> bool:
        """Tells whether this rank measures a projection."""
        return self.owners.get((family, projection)) == self.shards.rank

    def fire(self, trainer: Trainer, optimizer: Optimizer, full: bool) -> None:
        """Measures W_s and its gradient."""
        self.measure(trainer, full, final=False)

    @torch.no_grad()
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measures the final weights, in a row of their own."""
        self.guarded(trainer, lambda: self.measure(trainer, full=True, final=True))

    def record(
        self,
        trainer: Trainer,
        families: Sequence[ContinuityRows],
        started: float,
        headline: tuple[str, ContinuityRows],
    ) -> None:
        """Exchanges the ranks' values and hands them to the collector, with what had no value and the time it took.

        Args:
            trainer: The running trainer.
            families: The values of this firing; afterwards they hold those of all ranks.
            started: ``time.perf_counter()`` at the start of the firing.
            headline: Name in the progress bar, and the family whose headline it shows.
        """
        several = self.shards.ranks > 1
        parts = self.exchange(
            trainer,
            lambda: ([family.share() for family in families] if several else [], time.perf_counter() - started),
        )
        if several:
            for number, family in enumerate(families):
                family.merge([shares[number] for shares, _ in parts])
        name, value = headline[0], headline[1].headline(self.map)
        Collector.of(trainer).add(
            trainer,
            {key: value for family in families for key, value in family.metrics.items()},
            headline={} if value is None else {name: value},
            arrays={key: value for family in families for key, value in family.arrays.items()},
            skipped=sum(family.skipped for family in families),
            milliseconds=1e3 * max((seconds for _, seconds in parts), default=0.0),
        )


def find_weights(pl_module: LightningModule, patterns: Patterns | None, who: str) -> WeightMap:
    """Returns the map of the module's matrices, from patterns if given, otherwise from its own ``weight_map()``.

    Raises:
        UserError: There are no patterns and the module has no ``weight_map``, or a pattern does not fit the module.
    """
    if patterns is None:
        own = getattr(pl_module, "weight_map", None)
        if callable(own):
            return own()
        raise UserError(
            f"{who}: {type(pl_module).__name__} has no weight_map(); give the matrices as"
            r" `weights: {q: 'layers\.(\d+)\.attn\.q_proj\.weight', ...}`, projection: pattern of parameter names"
        )
    shapes = {name: parameter.shape for name, parameter in pl_module.named_parameters()}
    found = WeightMap.from_patterns(patterns, shapes)
    if found.unmatched:
        rank_zero_info(f"{who} leaves out the matrices {', '.join(found.unmatched)}")
    return found
