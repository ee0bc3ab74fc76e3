"""Summarising rows of runs into a table of means and spreads, as CSV and Markdown."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from typing import Any


def summarise_by_variant(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> list[dict[str, Any]]:
    """Returns a row for each variant, in order of appearance.

    Each column becomes ``{column}`` (mean over seeds) and ``{column}_spread`` (sample standard deviation; None for one
    seed); ``seeds`` counts the runs that have ended, ``failed`` those among them that failed.
    """
    table = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        runs = [row for row in rows if row["variant"] == variant]
        summary: dict[str, Any] = {"variant": variant, "seeds": len(runs)}
        summary["failed"] = sum(row["status"] != "finished" for row in runs)
        for column in columns:
            values = [row[column] for row in runs if row.get(column) is not None]
            summary[column] = statistics.fmean(values) if values else None
            summary[f"{column}_spread"] = statistics.stdev(values) if len(values) > 1 else None
        table.append(summary)
    return table


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns rows as CSV; what is missing stays empty."""
    fields = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, fields, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_markdown(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table, its columns aligned for reading as plain text."""
    widths = [max(len(line[i]) for line in [header, *body]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([line(header), rule, *map(line, body)]) + "\n"


def mean_and_spread(summary: Mapping[str, Any], column: str, digits: int = 2) -> str:
    """Returns ``0.97 +- 0.01`` for a column of :func:`summarise_by_variant`, ``-`` where there is no value."""
    mean, spread = summary[column], summary[f"{column}_spread"]
    if mean is None:
        return "-"
    return f"{mean:.{digits}f}" if spread is None else f"{mean:.{digits}f} ± {spread:.{digits}f}"
