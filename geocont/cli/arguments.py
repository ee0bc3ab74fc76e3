"""What happens to the arguments of ``geocont fit`` before they are parsed: finding files, and the run to resume."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from geocont.cli.options import nearest
from geocont.conf import find_config
from geocont.errors import UserError
from geocont.runs.directory import CHECKPOINTS, CONFIG_FILE, LAST_CHECKPOINT, RunOptions, newest_run, read_manifest

CONFIG_OPTIONS = ("--config", "-c")
SECTIONS = ("run", "trainer", "callbacks", "logger")


#: What ``--resume`` lets one change: the rest is in the checkpoint, or must be as it was for the numbers to be.
CHANGEABLE = ("--trainer.", "--callbacks.", "--logger.", "--ckpt_path")


def with_found_configs(arguments: Sequence[str], switches: Mapping[str, Iterable[str]]) -> list[str]:
    """Replaces the value of each ``--config`` by the file it names, which may be a shipped one.

    Args:
        arguments: Of the command.
        switches: Section of a file -> the switches it may have; others would be ignored by the parser.

    Raises:
        UserError: A file is not there, is not YAML, has another shape, or an unknown switch.
    """
    for option, value in pairs(arguments):
        if option in CONFIG_OPTIONS and value:
            content = read_config(find_config(value))
            for section, valid in switches.items():
                for switch in content.get(section) or {}:
                    if switch not in valid:
                        raise UserError(f"{value}: {section}.{switch} is not an option{nearest(str(switch), valid)}")
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
    known = (*CONFIG_OPTIONS, "--resume", "--run.root", "--run.experiment")
    for option, _ in given:
        if option.startswith("--") and option not in known and not option.startswith(CHANGEABLE):
            raise UserError(
                f"{option}: a resumed run keeps model, data and seed; trainer, callbacks and logger may change"
            )
    kept = [pair for pair in given if pair[0] not in (*CONFIG_OPTIONS, "--resume")]
    options = [("--config", str(path / CONFIG_FILE)), *kept, ("--resume", str(path))]
    return [part for option, value in options for part in _joined(option, value)]


def read_config(path: Path) -> dict[str, Any]:
    """Returns the content of a configuration file.

    Raises:
        UserError: It is not YAML with named sections.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"--config: {path} is not YAML: {' '.join(str(error).split())[:200]}") from error
    except OSError as error:
        raise UserError(f"--config: {path} cannot be read: {error.strerror}") from error
    content = {} if content is None else content
    if not isinstance(content, dict):
        raise UserError(
            f"--config: {path} must have named sections such as model, data, trainer, not a {_kind(content)}"
        )
    for section in SECTIONS:
        if section in content and not isinstance(content[section], dict):
            raise UserError(f"--config: {path}: {section} must have named entries, not {_kind(content[section])}")
    return content


def _kind(value: Any) -> str:
    return {"NoneType": "nothing", "list": "list"}.get(type(value).__name__, f"{type(value).__name__} {value!r}")


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
            found |= read_config(Path(value)).get("run") or {}
        elif option.startswith("--run.") and value:
            found[option.removeprefix("--run.")] = value
    return RunOptions(**{key: found[key] for key in ("root", "experiment") if key in found})
