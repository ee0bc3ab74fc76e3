"""What happens to the arguments of ``geocont fit`` before they are parsed: finding files, and the run to resume."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from geocont.conf import find_config
from geocont.errors import UserError
from geocont.runs.directory import CHECKPOINTS, CONFIG_FILE, LAST_CHECKPOINT, RunOptions, newest_run, read_manifest

CONFIG_OPTIONS = ("--config", "-c")


def with_found_configs(arguments: Sequence[str]) -> list[str]:
    """Replaces the value of each ``--config`` by the file it names, which may be a shipped one."""
    return [
        part
        for option, value in pairs(arguments)
        for part in (
            [option, str(find_config(value))] if option in CONFIG_OPTIONS and value else _joined(option, value)
        )
    ]


def with_resumed_run(arguments: Sequence[str]) -> list[str]:
    """Replaces ``--resume last`` by the run it means, and puts the run's own configuration before the other options.

    Configuration files given beside ``--resume`` name the experiment for ``last`` and have no other effect.

    Raises:
        UserError: There is nothing to resume.
    """
    given = list(pairs(arguments))
    resume = next((value for option, value in given if option == "--resume"), None)
    if resume is None:
        return list(arguments)
    path = newest_run(_run_options(given)) if resume == "last" else Path(resume)
    read_manifest(path)
    if not (path / CHECKPOINTS / LAST_CHECKPOINT).exists():
        raise UserError(f"--resume: nothing to resume in {path}: it has no checkpoint; start without --resume")
    kept = [pair for pair in given if pair[0] not in (*CONFIG_OPTIONS, "--resume")]
    options = [("--config", str(path / CONFIG_FILE)), *kept, ("--resume", str(path))]
    return [part for option, value in options for part in _joined(option, value)]


def pairs(arguments: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yields (option, value) for ``--option value`` and ``--option=value``; value None for a flag or a lone word."""
    rest = list(arguments)
    while rest:
        option, equals, value = rest.pop(0).partition("=")
        if equals:
            yield option, value
        elif option.startswith("-") and rest and not rest[0].startswith("--"):
            yield option, rest.pop(0)
        else:
            yield option, None


def _joined(option: str, value: str | None) -> list[str]:
    return [option] if value is None else [f"{option}={value}"] if option.startswith("--") else [option, value]


def _run_options(given: Sequence[tuple[str, str | None]]) -> RunOptions:
    """Reads ``run.root`` and ``run.experiment`` as the parser will, later ones over earlier ones."""
    found: dict[str, Any] = {}
    for option, value in given:
        if option in CONFIG_OPTIONS and value:
            content = yaml.safe_load(Path(value).read_text(encoding="utf-8"))
            found |= (content or {}).get("run") or {}
        elif option.startswith("--run.") and value:
            found[option.removeprefix("--run.")] = value
    return RunOptions(**{key: found[key] for key in ("root", "experiment") if key in found})
