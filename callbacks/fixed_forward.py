"""FixedForward: the forward pass of one training batch, run again at later states of the same model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map


@dataclass(frozen=True)
class Recorded:
    """A call of a module, with its own copy of the inputs."""

    module: nn.Module
    args: tuple
    kwargs: dict[str, Any]
    repeatable: bool  # no input was computed from the parameters


class FixedForward:
    """Records which modules a training step calls, whatever it makes of its batch, and calls them again with copies.

    Recorded are the outermost calls (``self(x)`` or ``self.model(x)`` in a ``training_step``) within which a counter
    moves. They can be repeated if none of their inputs was computed from the parameters, as those of ``self.head(
    self.body(x))`` are.

    Args:
        count: The counter.
    """

    def __init__(self, count: Callable[[], int]) -> None:
        self._count = count
        self._hooks: list[Any] = []
        self._open: list[tuple[Recorded | None, int]] = []  # calls that run now, and the counter before them
        self.calls: list[Recorded] = []

    def record(self, pl_module: LightningModule) -> None:
        """Begins to record, until :meth:`stop`."""
        for module in pl_module.modules():
            self._hooks.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(self._leave, always_call=True))

    def stop(self) -> None:
        """Ends recording."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._open = [], []

    @property
    def repeatable(self) -> bool:
        """Whether there is something to run again."""
        return bool(self.calls) and all(call.repeatable for call in self.calls)

    def run(self, trainer: Trainer) -> None:
        """Calls the recorded modules in eval mode, without gradients; random states and modes are restored."""
        module = trainer.lightning_module
        fork = torch.random.fork_rng([module.device] if module.device.type == "cuda" else [])
        with fork, torch.no_grad(), _eval_mode(module), trainer.precision_plugin.forward_context():
            for call in self.calls:
                call.module(*call.args, **call.kwargs)

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if (
            isinstance(module, LightningModule)
            and getattr(module.forward, "__func__", None) is not type(module).forward
        ):
            call = None  # a strategy that runs training_step in the place of forward, as DDP's does
        elif any(call is not None for call, _ in self._open):
            call = Recorded(module, (), {}, repeatable=False)  # an inner call, of no interest
        else:
            call = _recorded(module, args, kwargs)
        self._open.append((call, self._count()))

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        call, before = self._open.pop() if self._open else (None, 0)
        outermost = all(other is None for other, _ in self._open)
        if call is not None and outermost and self._count() > before:
            self.calls.append(call)


def _recorded(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Recorded:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if not any(tensor.requires_grad for tensor in tensors):
        with suppress(Exception):  # what cannot be copied must not end the training
            args, kwargs = tree_map(_copy, (args, kwargs))
            return Recorded(module, args, kwargs, repeatable=True)
    return Recorded(module, (), {}, repeatable=False)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


@contextmanager
def _eval_mode(module: nn.Module) -> Any:
    """Puts a module into eval mode, and afterwards each of its modules into the mode it was in."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
