"""Writing small files so that a reader, or a kill at any moment, never sees half of one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_atomically(path: Path, content: str) -> None:
    """Replaces a text file in one step."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(content, encoding="utf-8")
    os.replace(temporary, path)


def write_json(path: Path, value: Any) -> None:
    """Replaces a JSON file in one step."""
    write_atomically(path, json.dumps(value, indent=2, default=str) + "\n")
