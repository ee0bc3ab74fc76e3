"""What runs are called in a report: as short as tells them apart, and short enough for a legend."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LONGEST = 32  # characters that a legend has room for, on a telephone too
#: A directory that ``geocont fit`` has named itself: when it was made, ``run.name``, and the run's identity.
_MADE = re.compile(r"\d{8}-\d{6}(?:-(?P<name>.+))?-(?P<identity>\w+)")


def name_apart(paths: Sequence[Path], manifests: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a name for each run: no two are the same, and each is the shortest that nobody else has.

    Args:
        paths: Directories of the runs, resolved, each another one.
        manifests: What their manifest.json say, empty where that is unreadable.
    """
    choices = [_choices(path, manifest) for path, manifest in zip(paths, manifests, strict=True)]
    levels = [0] * len(choices)
    names = [found[0] for found in choices]
    while len(set(names)) < len(names):
        same = [names.count(name) > 1 and levels[i] + 1 < len(choices[i]) for i, name in enumerate(names)]
        if not any(same):
            break
        levels = [level + up for level, up in zip(levels, same, strict=True)]
        names = [found[level] for found, level in zip(choices, levels, strict=True)]
    fitted = [_fitted(name) for name in names]
    return [name if fitted.count(name) == 1 else f"{number}: {name}" for number, name in enumerate(fitted, 1)]


def _choices(path: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Returns what a run may be called, the shortest first."""
    made = _MADE.fullmatch(path.name)
    if made is None:
        return ["/".join(path.parts[-parts:]) for parts in range(1, len(path.parts) + 1)]
    experiment = str(manifest.get("experiment") or path.parent.name)
    seed = f", seed {manifest['seed']}" if manifest.get("seed") is not None else ""
    names = [experiment] if made["name"] is None else [made["name"], f"{experiment}/{made['name']}"]
    return [*names, f"{names[0]}{seed}", f"{names[-1]} {made['identity']}"]


def _fitted(name: str) -> str:
    """Leaves out the middle of a name that is too long: beginnings and ends are what tells names apart."""
    half = (LONGEST - 1) // 2
    return name if len(name) <= LONGEST else f"{name[:half]}\N{HORIZONTAL ELLIPSIS}{name[-half:]}"
