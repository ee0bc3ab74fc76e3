"""Lightning callbacks that watch the geometry of weights and gradients while a model trains.

They work in any Lightning project: give them to a ``Trainer``, with ``weights`` as regular expressions of parameter
names, and they log to whatever logger the trainer has. On the ``geocont`` command line each has a switch named after
its class, ``--callbacks.weight_continuity.every_n_steps=50``.
"""

import re

from lightning.pytorch import Callback

from callbacks.gradient_coherence import GradientCoherence
from callbacks.last_checkpoint import LastCheckpoint
from callbacks.optimizer_monitor import OptimizerMonitor
from callbacks.progress_bar import ProgressBar
from callbacks.softmax_saturation import SoftmaxSaturation
from callbacks.spectral_dynamics import SpectralDynamics
from callbacks.spectral_gap import SpectralGap
from callbacks.stability_guard import StabilityGuard
from callbacks.step_monitor import StepMonitor
from callbacks.weight_continuity import WeightContinuity

__all__ = [
    "GradientCoherence",
    "LastCheckpoint",
    "OptimizerMonitor",
    "ProgressBar",
    "SoftmaxSaturation",
    "SpectralDynamics",
    "SpectralGap",
    "StabilityGuard",
    "StepMonitor",
    "WeightContinuity",
]


def switch_of(callback: type[Callback]) -> str:
    """Returns the name of a callback's switch: ``weight_continuity`` of ``WeightContinuity``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", callback.__name__).lower()
