"""What the LightningModules of all model families share: optimizer, schedule and weight map."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_only
from torch import nn

from geocont.errors import UserError
from geocont.optim import ModuleWise, NamedParameters, OptimizerFactory, Schedule
from geocont.weights import WeightMap, WeightPattern, canonical_name


class GeoModule(LightningModule):
    """Base LightningModule: a subclass sets ``self.model``, names its matrices and computes the loss.

    Args:
        optimizer: Builds the optimizer from (name, parameter) pairs: any ``torch.optim`` class with its options, or
            :class:`~geocont.optim.Composite` for several rules.
        schedule: How learning rates change over the optimizer steps.
    """

    #: Projection -> pattern of parameter names, relative to the module; see :class:`~geocont.weights.WeightPattern`.
    WEIGHTS: ClassVar[dict[str, str]] = {}

    model: nn.Module

    def __init__(self, optimizer: OptimizerFactory, schedule: Schedule) -> None:
        super().__init__()
        self.optimizer_factory = optimizer
        self.schedule = schedule

    def weight_patterns(self) -> Mapping[str, str | WeightPattern]:
        """Returns where the matrices of each projection lie, ``WEIGHTS`` unless the network's shape decides."""
        return self.WEIGHTS

    def weight_map(self) -> WeightMap:
        """Returns which parameter plays which role at which depth."""
        return WeightMap.from_patterns(self.weight_patterns(), {name: p.shape for name, p in self.named_parameters()})

    def configure_optimizers(self) -> Any:
        """Builds the optimizer over all trainable parameters, and the schedule in optimizer steps.

        Raises:
            UserError: The optimizer does not take its options.
        """
        trainable = [(canonical_name(name), p) for name, p in self.named_parameters() if p.requires_grad]
        try:
            optimizer = self.optimizer_factory(NamedParameters(trainable, self.weight_map()))
        except ValueError as error:  # torch's way of refusing a learning rate below zero and the like
            raise UserError(f"model.optimizer: {error}") from error
        if isinstance(optimizer, ModuleWise):
            rank_zero_only(print)(optimizer.describe())
        for group in optimizer.param_groups:
            group.setdefault("name", type(optimizer).__name__.lower())  # the rule in lr/{rule}
        scheduler = self.schedule.build(optimizer, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
