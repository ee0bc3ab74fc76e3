"""The progress bar, in a terminal of its own."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
from pathlib import Path

import pytest

from tests.conftest import SMALL


def in_a_terminal(columns: int, folder: Path, *options: str) -> str:
    """Runs ``geocont fit`` in a terminal of some width and returns all that it wrote there."""
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        known = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
        command = [sys.executable, "-m", "geocont", "fit", *options]
        os.execve(sys.executable, command, known | {"TERM": "xterm-256color"})  # readline sets COLUMNS past os.environ
    written = b""
    while True:
        try:
            part = os.read(terminal, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        written += part
    assert os.waitpid(process, 0)[1] == 0, written.decode(errors="replace")[-3000:]
    return written.decode(errors="replace")


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (80, "loss: N coherence: N continuity: N"),
        (120, "loss: N coherence: N continuity: N val/loss: N"),
        (150, "loss: N coherence: N continuity: N val/loss: N accuracy: N"),
    ],
)
def test_all_of_it_is_on_one_line(columns: int, shown: str, tmp_path: Path) -> None:
    """At 150 columns the bar took two lines, at 80 it cut its metrics, and messages were written at its end."""
    options = ("--trainer.max_epochs=2", "--trainer.limit_train_batches=12", "--trainer.limit_val_batches=2")
    every = tuple(f"--callbacks.{name}.every_n_steps=1" for name in ("gradient_coherence", "weight_continuity"))
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", in_a_terminal(columns, tmp_path, *SMALL, *options, *every))
    drawn = [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.startswith("Epoch")]
    assert max(map(len, drawn)) <= columns
    last = re.sub(r"\b\d+\.\d+\b", "N", drawn[-1])
    assert last.startswith("Epoch 1/1 ")
    assert last.endswith(shown)
    assert "12/12" in last
    assert not any("`" in line for line in drawn)
    assert "\n`Trainer.fit` stopped: `max_epochs=2` reached." in text.replace("\r", "\n")
    assert "Epoch 0/-2" not in text
