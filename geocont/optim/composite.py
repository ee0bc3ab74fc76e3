"""One optimizer made of several, each for its own parameters.

Lightning's automatic optimization (clipping, accumulation, schedulers, checkpoints, one ``global_step``) wants a single
optimizer, while matrices, embeddings and norms want different ones. A :class:`Composite` is that single optimizer: its
parameter groups are those of its parts, so a scheduler scales all of them together.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from geocont.errors import UserError
from geocont.optim.sharding import Sharded
from geocont.weights import WeightMap

#: What builds an optimizer when given (name, parameter) pairs: a class with its options bound, as the CLI makes it.
OptimizerFactory = Callable[[Iterable[Any]], Optimizer]

MATRICES = "matrices"
REST = "rest"


class NamedParameters(list[tuple[str, Parameter]]):
    """(name, parameter) pairs of a module, as torch's optimizers take them, beside the module's weight map."""

    def __init__(self, pairs: Iterable[tuple[str, Parameter]], weights: WeightMap | None = None) -> None:
        super().__init__(pairs)
        self.weights = weights


@dataclass
class Rule:
    """Which parameters an optimizer of the composite gets.

    Attributes:
        optimizer: The optimizer and its options, e.g. ``{class_path: torch.optim.Muon, init_args: {lr: 0.02}}``.
        parameters: ``matrices`` (those of the model's weight map: never embeddings, heads, norms or biases), ``rest``
            (what no other rule takes), or a regular expression found anywhere in a parameter's name.
    """

    optimizer: OptimizerFactory
    parameters: str = REST


class Composite(Optimizer):
    """Steps several optimizers as one.

    Every parameter belongs to exactly one rule. Each parameter group carries the name of its rule, ``group["name"]``.

    Args:
        params: (name, parameter) pairs, a :class:`NamedParameters` where a rule uses ``matrices``.
        rules: Name -> :class:`Rule`, e.g. ``{muon: {parameters: matrices, optimizer: ...}, adamw: {optimizer: ...}}``.

    Raises:
        UserError: A parameter is covered by no rule or by two, or a rule takes no parameter.
    """

    def __init__(self, params: Iterable[tuple[str, Parameter]], rules: Mapping[str, Rule]) -> None:
        params = params if isinstance(params, NamedParameters) else NamedParameters(params)
        if not rules:
            raise UserError("optimizer.rules: give at least one rule")
        self._combine({name: rules[name].optimizer(selected) for name, selected in assign(params, rules).items()})

    def _combine(self, parts: Mapping[str, Optimizer]) -> None:
        """Becomes the optimizer of all parameters of its parts."""
        super().__init__([p for part in parts.values() for group in part.param_groups for p in group["params"]], {})
        self.parts = dict(parts)
        for name, part in self.parts.items():
            for group in part.param_groups:
                group["name"] = name
        self.param_groups = [group for part in self.parts.values() for group in part.param_groups]
        self._share()

    def _share(self) -> None:
        """Lets the parts work on this optimizer's own groups and state, so that there is one truth to save."""
        for name, part in self.parts.items():
            part.param_groups = [group for group in self.param_groups if group["name"] == name]
            part.state = self.state

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a copy needs: torch's own keeps groups and state only."""
        return {**super().__getstate__(), "parts": self.parts}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Performs one step of every part; the closure is evaluated once, before them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.step_parts()
        return loss

    def step_parts(self) -> None:
        """Performs the step, gradients being there."""
        for part in self.parts.values():
            part.step()

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Brings the whole state to one rank, where ``state_dict`` returns it then; every rank must call it.

        Lightning does so whenever it saves a checkpoint. Without parts that share their work among ranks this does
        nothing.
        """
        for part in self._sharded_parts():
            part.consolidate_state_dict(to)

    def state_dict(self) -> dict[str, Any]:
        """Returns groups and the whole state.

        Raises:
            UserError: Some of the state is on other ranks: they must all call ``consolidate_state_dict`` before.
        """
        for part in self._sharded_parts():
            part.check_whole()
        state = super().state_dict()
        for part in self._sharded_parts():
            part.release()
        return state

    def _sharded_parts(self) -> list[Sharded]:
        return [part for part in self.parts.values() if isinstance(part, Sharded)]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores groups and state, which must have been saved under the same rules.

        Raises:
            UserError: The state was saved under other rules.
        """
        saved = [group.get("name") for group in state_dict["param_groups"]]
        present = [group["name"] for group in self.param_groups]
        if saved != present:
            raise UserError(f"optimizer.rules: the checkpoint was saved under the rules {saved}, these are {present}")
        super().load_state_dict(state_dict)
        self._share()
        for part in self._sharded_parts():
            part.forget_owners()


def assign(params: NamedParameters, rules: Mapping[str, Rule]) -> dict[str, NamedParameters]:
    """Returns the parameters of each rule; the order within a rule is that of ``params``.

    Raises:
        UserError: A parameter is covered by no rule or by two, or a rule takes no parameter.
    """
    rest = [name for name, rule in rules.items() if rule.parameters == REST]
    if len(rest) > 1:
        raise UserError(f"optimizer.rules: {' and '.join(rest)} both take the rest; only one rule can")
    taken: dict[str, NamedParameters] = {name: NamedParameters([], params.weights) for name in rules}
    for name, parameter in params:
        owners = [rule_name for rule_name, rule in rules.items() if _takes(rule_name, rule, name, params.weights)]
        if len(owners) > 1:
            raise UserError(f"optimizer.rules: {name} is covered by {' and '.join(owners)}; narrow one `parameters`")
        if not owners and not rest:
            raise UserError(f"optimizer.rules: no rule covers {name}; add one with `parameters: {REST}`")
        taken[(owners or rest)[0]].append((name, parameter))
    for rule_name, selected in taken.items():
        if not selected:
            raise UserError(
                f"optimizer.rules.{rule_name}.parameters: {rules[rule_name].parameters!r} takes no parameter;"
                f" there are {', '.join(name for name, _ in params[:3])} ..."
            )
    return taken


def _takes(rule_name: str, rule: Rule, name: str, weights: WeightMap | None) -> bool:
    if rule.parameters == REST:
        return False
    if rule.parameters == MATRICES:
        if weights is None:
            raise UserError(f"optimizer.rules.{rule_name}.parameters: the model has no weight map for {MATRICES!r}")
        return name in weights.parameters
    try:
        return re.search(rule.parameters, name) is not None
    except re.error as error:
        raise UserError(
            f"optimizer.rules.{rule_name}.parameters: {rule.parameters!r} is not a regular expression: {error}"
        ) from error
