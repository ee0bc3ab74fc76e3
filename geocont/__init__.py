"""geocont: a PyTorch Lightning laboratory for the geometry of weight space.

Importing the package loads neither torch nor lightning, so that ``geocont --help`` answers at once.
"""

__version__ = "0.1.0"
