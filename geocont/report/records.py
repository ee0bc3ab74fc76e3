"""Reading runs for a report, whatever state they are in: what cannot be read becomes a sentence, not an exception."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from geocont.errors import UserError
from geocont.report.names import name_apart
from geocont.runs.directory import CONFIG_FILE, MANIFEST_FILE, read_manifest
from geocont.runs.store import ARRAYS_FOLDER, METRICS_FILE, read_all_arrays, read_metrics

GUARD_FILE = "guard.jsonl"
SHOWN_KEYS = 5  # of those that a problem names
#: Switch of a callback -> what its keys begin with.
CALLBACKS = {
    "gradient_coherence": "gradient/",
    "weight_continuity": "weight/",
    "softmax_saturation": "softmax/",
    "spectral_dynamics": "spectrum/",
    "optimizer_monitor": "optim/",
    "stability_guard": "guard/",
}


@dataclass(frozen=True)
class RunRecord:
    """All that a report says of one run.

    Attributes:
        name: What tells it from the other runs of the report.
        path: Its directory.
        manifest: Content of manifest.json; empty where that cannot be read.
        config: Its configuration, flat: ``model.init_args.network.width`` -> 256.
        rows: Its rows in order of step, each ``{"step": 50, "train/loss": 0.31, ...}``, None for what is not finite.
        arrays: Key -> step -> array of its store.
        events: Of StabilityGuard.
        problems: Sentences about what is missing or broken.
    """

    name: str
    path: Path
    manifest: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    arrays: dict[str, dict[int, np.ndarray]] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    problems: tuple[str, ...] = ()

    def keys(self, beginning: str = "") -> list[str]:
        """Returns the keys of its rows that begin like this, sorted."""
        return sorted({key for row in self.rows for key in row if key.startswith(beginning) and key != "step"})

    def curve(self, key: str) -> tuple[list[int], list[float | None]]:
        """Returns steps and values of a key, None where a value was not finite."""
        points = [(row["step"], row[key]) for row in self.rows if key in row]
        return [step for step, _ in points], [value for _, value in points]

    def ends(self, key: str) -> tuple[float, float] | None:
        """Returns the first and the last finite value of a key."""
        values = [value for value in self.curve(key)[1] if value is not None]
        return (values[0], values[-1]) if values else None


def read_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """Reads the directories of runs; each gets a name of its own.

    Raises:
        UserError: A directory is not there, one is given twice, or none of them holds anything of a run.
    """
    resolved = [path.resolve() for path in paths]
    for path, real in zip(paths, resolved, strict=True):
        if not real.is_dir():
            raise UserError(f"{path} is not a directory; give the directories of runs, such as runs/mlp/res_relu/*")
        if resolved.count(real) > 1:
            raise UserError(f"{path} is given more than once")
    found = [read_run(path, str(path)) for path in paths]
    names = name_apart(resolved, [run.manifest for run in found])
    runs = [replace(run, name=name) for run, name in zip(found, names, strict=True)]
    if not any(run.manifest or run.rows or run.arrays for run in runs):
        given = ", ".join(map(str, paths[:3])) + (" ..." if len(paths) > 3 else "")
        raise UserError(
            f"{given}: no readable {MANIFEST_FILE}, {METRICS_FILE} or {ARRAYS_FOLDER}/ of a run is in there"
        )
    return runs


def read_run(path: Path, name: str) -> RunRecord:
    """Reads one run; what is missing or broken is named in its problems."""
    problems: list[str] = []
    manifest = _attempt(problems, MANIFEST_FILE, lambda: read_manifest(path), {})
    config = _attempt(problems, CONFIG_FILE, lambda: _config(path / CONFIG_FILE), {})
    rows = [_numbers(row) for row in _attempt(problems, METRICS_FILE, lambda: read_metrics(path), [])]
    arrays = _attempt(problems, f"{ARRAYS_FOLDER}/", lambda: read_all_arrays(path), {})
    events = _attempt(problems, GUARD_FILE, lambda: _events(path / GUARD_FILE), [])
    problems += [*_ending(manifest), *_gaps(rows, arrays), *_silent(config, rows)]
    return RunRecord(name, path, manifest, config, rows, arrays, events, tuple(problems))


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Returns nested mappings as one with dotted keys; lists and empty mappings are values."""
    if not isinstance(value, Mapping) or not value:
        return {prefix: value} if prefix else {}
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found |= flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    return found


def _attempt(problems: list[str], what: str, read: Callable[[], Any], otherwise: Any) -> Any:
    try:
        return read()
    except (UserError, FileNotFoundError):
        problems.append(f"{what} is missing or unreadable.")
    except Exception as error:  # whatever a broken file makes a reader raise
        problems.append(f"{what} cannot be read ({type(error).__name__}: {str(error).splitlines()[0][:120]}).")
    return otherwise


def _numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row with None for what is not a finite number, whoever has written it."""
    return {
        key: value if isinstance(value, int | float) and math.isfinite(value) else None for key, value in row.items()
    }


def _config(path: Path) -> dict[str, Any]:
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise UserError("no configuration")
    return flatten(content)


def _events(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    events = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            continue  # cut short by a kill
        if isinstance(event, dict):
            events.append(event)
    return events


def _ending(manifest: Mapping[str, Any]) -> list[str]:
    status = manifest.get("status")
    if status == "failed":
        return [f"The run failed: {manifest.get('error', 'for a reason that it could not tell')}"]
    if status == "interrupted":
        return [f"The run was interrupted at step {manifest.get('step', '?')}; geocont fit --resume continues it."]
    if status == "running":
        return ["The run had not ended when this was written: it goes on, or it was killed."]
    return []


def _gaps(rows: Sequence[Mapping[str, Any]], arrays: Mapping[str, Any]) -> list[str]:
    problems = []
    if not rows:
        problems.append("It has logged no row.")
    elif len(rows) == 1:
        problems.append(f"It has logged one row only, of step {rows[0]['step']}: there are points instead of curves.")
    if not arrays:
        problems.append("It has no per-pair values or leading vectors, so no heat maps and trajectories.")
    lasts = {key: row["step"] for row in rows for key in row if key in arrays}
    behind = [key for key, step in lasts.items() if step > max(arrays[key])]
    if behind:
        key = behind[0]
        problems.append(
            f"The store is cut short: {key} ends at step {max(arrays[key])}, its rows at step {lasts[key]}."
        )
    broken = {key: row["step"] for row in reversed(rows) for key, value in row.items() if value is None}
    if broken:
        first = sorted(broken, key=lambda key: (broken[key], key))
        named = ", ".join(f"{key} from step {broken[key]}" for key in first[:SHOWN_KEYS])
        more = f" and {len(first) - SHOWN_KEYS} more keys" if len(first) > SHOWN_KEYS else ""
        problems.append(f"Not finite (NaN or infinite): {named}{more}; curves have gaps there.")
    return problems


def _silent(config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns which callbacks were on and have logged nothing."""
    on = {key.split(".")[1] for key, value in config.items() if key.startswith("callbacks.") and value is not None}
    keys = {key for row in rows for key in row}
    silent = [
        name for name, begin in CALLBACKS.items() if name in on and not any(key.startswith(begin) for key in keys)
    ]
    return [f"callbacks.{name} was on and has logged nothing." for name in silent] if rows else []


def finite(value: float) -> float | None:
    """Returns a number with five significant digits, None where it is not finite."""
    return float(f"{value:.4g}") if math.isfinite(value) else None
