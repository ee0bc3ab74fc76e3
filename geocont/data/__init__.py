"""LightningDataModules on Hugging Face ``datasets``, with an order that resumes in mid-epoch."""

from geocont.data.images import MNIST, Digits, ImageClassification
from geocont.data.loader import ResumableLoader
from geocont.data.text import Text

__all__ = ["MNIST", "Digits", "ImageClassification", "ResumableLoader", "Text"]
