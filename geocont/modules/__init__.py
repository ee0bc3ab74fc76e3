"""One LightningModule for each model family, thin, over a shared base."""

from geocont.modules.base import GeoModule
from geocont.modules.residual_mlp import ResidualMLPModule

__all__ = ["GeoModule", "ResidualMLPModule"]
