"""The model families: plain ``nn.Module`` and a configuration dataclass each, no Lightning."""

from geocont.models.residual_mlp import ResidualMLP, ResidualMLPConfig

__all__ = ["ResidualMLP", "ResidualMLPConfig"]
