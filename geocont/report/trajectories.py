"""The way of leading singular vectors through depth, projected onto a plane."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from geocont.report.records import finite


@dataclass(frozen=True)
class Trajectory:
    """Vectors of L layers in a plane, at some optimizer steps.

    Attributes:
        steps: ``(T,)``.
        x: First coordinates, ``(T, L)``, from -1 to 1; None where a vector is not finite.
        y: Second coordinates, ``(T, L)``.
        shares: Parts of the squares of the last step's vectors that lie along the two directions.
    """

    steps: list[int]
    x: list[list[float | None]]
    y: list[list[float | None]]
    shares: tuple[float, float]

    @property
    def layers(self) -> int:
        """Number of layers L."""
        return len(self.x[0])


def through_depth(vectors: Mapping[int, np.ndarray]) -> Trajectory | None:
    """Projects unit vectors of every layer onto the principal plane of the last step's.

    Signs of singular vectors are arbitrary: each is turned so that it points the way of the layer below, and the layers
    of a step, all together, the way of the next step.

    Args:
        vectors: Optimizer step -> vectors ``(L, d)``, in order of steps.

    Returns:
        The trajectory; None with fewer than two layers or dimensions, or without a finite step.
    """
    usable = {
        step: aligned(array.astype(float))
        for step, array in vectors.items()
        if array.ndim == 2 and min(array.shape) >= 2 and np.isfinite(array).all()
    }
    if not usable:
        return None
    steps = list(usable)
    shape = usable[steps[-1]].shape
    steps = [step for step in steps if usable[step].shape == shape]
    last = usable[steps[-1]]
    _, s, directions = np.linalg.svd(last, full_matrices=False)
    plane = directions[:2] * np.sign((last @ directions[:2].T).sum(0) + 1e-12)[:, None]  # (2, d)
    following = last
    places = []
    for step in reversed(steps):
        turned = usable[step] * (1.0 if float((usable[step] * following).sum()) >= 0 else -1.0)
        places.append(turned @ plane.T)  # (L, 2)
        following = turned
    x, y = ([[finite(float(value)) for value in place[:, axis]] for place in reversed(places)] for axis in (0, 1))
    squares = s**2 / max(float((s**2).sum()), 1e-30)
    return Trajectory(steps, x, y, (float(squares[0]), float(squares[1])))


def aligned(vectors: np.ndarray) -> np.ndarray:
    """Turns vectors ``(L, d)`` so that none points away from the one before it."""
    turned = vectors.copy()
    for layer in range(1, len(turned)):
        if float(turned[layer] @ turned[layer - 1]) < 0:
            turned[layer] *= -1
    return turned
