"""Healing the file of an offline W&B run whose process was killed."""

from __future__ import annotations

import struct
from pathlib import Path

BLOCK = 32768  # bytes; a .wandb file is a log of LevelDB's format after a header of its own
FILE_HEADER = 7
PIECE_HEADER = struct.Struct("<IHB")  # checksum, length, type
WHOLE, LAST = 1, 4  # types of pieces that end a record


def cut_incomplete_record(path: Path) -> bool:
    """Cuts a record off that a killed process has left half-written at the end of a ``.wandb`` file.

    `wandb sync` stops at such a record: it would never upload the later parts of a run that was resumed, and with each
    retry send the first part again. What is cut had not been written in full, so no row is lost.

    Returns:
        Whether anything had to be cut.
    """
    content = path.read_bytes()
    end = _end_of_records(content)
    if end >= len(content):
        return False
    with path.open("r+b") as file:
        file.truncate(end)
    return True


def heal_earlier_parts(run_dir: Path, run_id: str) -> None:
    """Heals what earlier processes of an offline run have left in its directory; what cannot be is left as it is."""
    for path in (run_dir / "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"):
        try:
            cut_incomplete_record(path)
        except OSError:
            continue


def _end_of_records(content: bytes) -> int:
    """Returns where the last complete record ends."""
    position = end = min(FILE_HEADER, len(content))
    while position + PIECE_HEADER.size <= len(content):
        left = BLOCK - position % BLOCK
        if left < PIECE_HEADER.size:
            position += left  # padding of a block
            continue
        _, length, kind = PIECE_HEADER.unpack_from(content, position)
        position += PIECE_HEADER.size + length
        if kind == 0 or position > len(content):
            break
        if kind in (WHOLE, LAST):
            end = position
    return end
