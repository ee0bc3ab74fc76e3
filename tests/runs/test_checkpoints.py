"""Checkpoints: whole at any moment, read without executing anything."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
from pathlib import Path

import pytest
import torch

from geocont.errors import UserError
from geocont.runs.checkpoint_io import AtomicCheckpointIO


def _save_for_ever(path: str) -> None:
    value = 0
    while True:
        AtomicCheckpointIO().save_checkpoint(
            {"state_dict": torch.full((300_000,), float(value)), "global_step": value}, path
        )
        value += 1


def test_a_kill_while_saving_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """fsspec's temporary file may lie on another disk: moving it is copying, and a kill leaves half a checkpoint."""
    path = tmp_path / "last.ckpt"
    for attempt in range(4):
        process = multiprocessing.get_context("spawn").Process(target=_save_for_ever, args=(str(path),))
        process.start()
        deadline = time.monotonic() + 60
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05 + 0.013 * attempt)
        process.kill()
        process.join()
        loaded = AtomicCheckpointIO().load_checkpoint(path)
        assert (loaded["state_dict"] == loaded["global_step"]).all()


def test_what_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple:
            return os.mkdir, (str(tmp_path / "executed"),)

    (tmp_path / "bomb.ckpt").write_bytes(pickle.dumps({"state_dict": Bomb()}))
    torch.save({"state_dict": Bomb()}, tmp_path / "bomb2.ckpt")
    (tmp_path / "half.ckpt").write_bytes(b"PK\x03\x04 no more")
    for name in ("bomb.ckpt", "bomb2.ckpt", "half.ckpt"):
        with pytest.raises(UserError, match=f"{name} cannot be read as a checkpoint"):
            AtomicCheckpointIO().load_checkpoint(tmp_path / name)
    assert not (tmp_path / "executed").exists()
    with pytest.raises(UserError, match=r"none.ckpt is not there"):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "none.ckpt")
