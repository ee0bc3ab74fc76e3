"""Manifolds of weight matrices: which constraint a module's matrices live on."""

from geocont.manifolds.base import Manifold
from geocont.manifolds.dgram import DGram
from geocont.manifolds.euclidean import Euclidean
from geocont.manifolds.oblique import Oblique
from geocont.manifolds.registry import MANIFOLDS, as_manifold
from geocont.manifolds.stiefel import Stiefel

__all__ = ["MANIFOLDS", "DGram", "Euclidean", "Manifold", "Oblique", "Stiefel", "as_manifold"]
