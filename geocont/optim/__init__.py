"""Optimizers: one composite of several rules, and the schedules that scale them."""

from geocont.optim.composite import Composite, NamedParameters, OptimizerFactory, Rule
from geocont.optim.schedule import Schedule

__all__ = ["Composite", "NamedParameters", "OptimizerFactory", "Rule", "Schedule"]
