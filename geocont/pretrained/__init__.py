"""Continuity of any checkpoint through depth: readers, architecture maps, and an analysis one matrix at a time."""

from geocont.pretrained.analysis import Analysis, analyze
from geocont.pretrained.checkpoint import Checkpoint, open_checkpoint

__all__ = ["Analysis", "Checkpoint", "analyze", "open_checkpoint"]
