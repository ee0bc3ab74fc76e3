"""Files of an analysis: rows and spectra as Parquet, CSV and JSON, summary, figures."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from geocont.errors import UserError
from geocont.pretrained.advisor import Advice, summarise_advice
from geocont.pretrained.analysis import Analysis
from geocont.report.tables import as_csv, as_markdown
from geocont.runs.files import write_atomically, write_json


def write_tables(out: Path, analyses: Sequence[Analysis]) -> list[Path]:
    """Writes ``rows`` and ``spectra`` (.parquet, .csv, .json) and ``summary.json``; returns what it wrote.

    Raises:
        UserError: The folder cannot be written.
    """
    written = []
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in ("rows", "spectra"):
            rows = [plain(row) for analysis in analyses for row in getattr(analysis, name)]
            if rows:
                written += _write_rows(out, name, rows)
        summary = [
            {"model": a.model, "family": a.family, "notes": a.notes, "projections": plain(a.summary)} for a in analyses
        ]
        write_json(out / "summary.json", summary)
    except OSError as error:
        raise UserError(f"--out: {out} cannot be written: {error.strerror or error}") from error
    return [*written, out / "summary.json"]


def _write_rows(out: Path, name: str, rows: list[dict[str, Any]]) -> list[Path]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = list(dict.fromkeys(key for row in rows for key in row))
    rows = [{key: row.get(key) for key in columns} for row in rows]
    write_atomically(out / f"{name}.csv", as_csv(rows))
    write_atomically(out / f"{name}.json", json.dumps(rows, indent=1) + "\n")
    temporary = out / f".{name}.parquet.tmp"
    pq.write_table(pa.Table.from_pylist(rows), temporary)
    temporary.replace(out / f"{name}.parquet")
    return [out / f"{name}{suffix}" for suffix in (".parquet", ".csv", ".json")]


def write_advice(out: Path, advice: Advice, limits: str) -> list[Path]:
    """Writes ``advice.csv`` (every run of layers), ``advice_layers.csv`` and ``advice.md``."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / "advice.csv", as_csv(advice.bases))
        write_atomically(out / "advice_layers.csv", as_csv(advice.layers))
        header, body = advice_table(advice)
        layers = ", ".join(f"{row['layer']} ({row['score']:.2f})" for row in advice.layers[:8])
        text = f"{as_markdown(header, body)}\nMost like their neighbours: layers {layers}\n\n{limits}\n"
        write_atomically(out / "advice.md", text)
    except OSError as error:
        raise UserError(f"--out: {out} cannot be written: {error.strerror or error}") from error
    return [out / "advice.md", out / "advice.csv", out / "advice_layers.csv"]


def advice_table(advice: Advice) -> tuple[list[str], list[list[str]]]:
    """Returns header and body of the advisor's table, a line for each projection."""
    header = ["projection", "side", "rank", "error", "other side", "random", "saved at 1 %", "at 5 %", "at 10 %"]
    body = []
    for line in summarise_advice(advice):
        errors = [_short(line[key]) for key in ("error", "error_wrong_side", "error_random")]
        savings = [_percent(line[f"saved_at_{error}"]) for error in ("0.01", "0.05", "0.1")]
        body.append([line["projection"], line["side"], str(line["rank"]), *errors, *savings])
    return header, body


def plain(value: Any) -> Any:
    """Returns a value with None for numbers that are not finite, which JSON has no word for."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "not reached" if value is None else f"{100 * value:.0f} %"
