"""Optimizers: Manifold Muon, one composite of several rules, and the schedules that scale them."""

from geocont.optim.assignment import ASSIGNMENTS, AdamWOptions, ModuleWise, MuonOptions
from geocont.optim.composite import Composite, NamedParameters, OptimizerFactory, Rule
from geocont.optim.manifold_muon import Block, ManifoldMuon
from geocont.optim.schedule import Schedule

__all__ = [
    "ASSIGNMENTS",
    "AdamWOptions",
    "Block",
    "Composite",
    "ManifoldMuon",
    "ModuleWise",
    "MuonOptions",
    "NamedParameters",
    "OptimizerFactory",
    "Rule",
    "Schedule",
]
