"""The tables of a report: the runs side by side, what the guard reported, where configurations differ."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from geocont.report.records import RunRecord
from geocont.report.summary import changed_most

#: Keys whose first and last values are shown, where a run has them.
HEADLINES = {
    "train/loss": "training loss",
    "val/loss": "validation loss",
    "val/accuracy": "validation accuracy",
    "val/perplexity": "validation perplexity",
    "softmax/max_logit/worst_head": "largest |logit|",
    "throughput/samples_per_second": "samples per second",
    "throughput/tokens_per_second": "tokens per second",
}
#: Where a run lies differs by nature, and says nothing of what it does.
PLACES = ("run.dir", "run.name", "trainer.default_root_dir", "ckpt_path", "resume")
CHANGES = 5  # largest ones, that are named


@dataclass(frozen=True)
class Table:
    """Header and rows of text; ``about`` says what they are."""

    about: str
    header: list[str]
    body: list[list[str]]


def overview_table(runs: Sequence[RunRecord]) -> Table:
    """Returns status, size, seed and headline measures of each run, a column for each."""
    body = [
        ["status", *(str(run.manifest.get("status", "unknown")) for run in runs)],
        ["experiment", *(str(run.manifest.get("experiment", "-")) for run in runs)],
        ["seed", *(str(run.manifest.get("seed", "-")) for run in runs)],
        ["started", *(_without_fraction(run.manifest.get("created", "-")) for run in runs)],
        ["last step", *(str(run.rows[-1]["step"] if run.rows else "-") for run in runs)],
        ["rows", *(str(len(run.rows)) for run in runs)],
    ]
    for key, label in HEADLINES.items():
        ends = [run.ends(key) for run in runs]
        if any(ends):
            body.append([label, *("-" if end is None else _moved(*end) for end in ends)])
    body.append(["changed most", *("\n".join(_changes(run)) or "-" for run in runs)])
    body.append(["directory", *(str(run.path) for run in runs)])
    return Table("Runs side by side", ["", *(run.name for run in runs)], body)


def guard_table(runs: Sequence[RunRecord]) -> Table | None:
    """Returns the events of StabilityGuard, None where there are none."""
    fields = ("step", "cause", "value", "bound", "layer", "head", "place")
    body = [
        [run.name, *(_value(event.get(name)) for name in fields), _count(event.get("others"))]
        for run in runs
        for event in run.events
    ]
    return Table("Guard events", ["run", *fields, "others at this step"], body) if body else None


def config_differences(runs: Sequence[RunRecord]) -> Table | None:
    """Returns the options that are not the same in all runs, None where all are (or there is one run)."""
    known = [run for run in runs if run.config]
    keys = sorted({key for run in known for key in run.config if key not in PLACES})
    body = []
    for key in keys:
        values = [_value(run.config.get(key, "not there")) for run in known]
        if len(set(values)) > 1:
            body.append([key, *values])
    return Table("Options that differ", ["option", *(run.name for run in known)], body) if body else None


def _changes(run: RunRecord) -> list[str]:
    return [f"{change.key} {_moved(change.first, change.last)}" for change in changed_most(run.rows, CHANGES)]


def _moved(first: float, last: float) -> str:
    return f"{first:.4g} \N{RIGHTWARDS ARROW} {last:.4g}"


def _without_fraction(moment: Any) -> str:
    return re.sub(r"\.\d+", "", str(moment))


def _count(value: Any) -> str:
    return str(len(value)) if isinstance(value, list) else "0"


def _value(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
