"""What a run leaves for W&B, read back by W&B's own reader: every key of every callback, in rows of measured steps."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from geocont.report.dashboard import SECTIONS
from geocont.runs.store import read_metrics

FAMILIES = ("weight", "gradient", "cumulative", "update")
LIGHT = ("v1", "u1", "topk_in", "topk_out", "cosine", "gap", "defined")
ATTENTION = ("max_logit", "entropy", "top_probability", "saturated", "jacobian", "logit_scale")
SPECTRUM = (
    "sigma_max",
    "sigma_min",
    "condition",
    "stable_rank",
    "gram_off_diagonal",
    "column_norm_min",
    "column_norm_max",
)
PROJECTIONS = ("q", "k", "v", "o", "up", "down")
OWN = ("_step", "_runtime", "_timestamp", "_wandb")  # of W&B


def inspect(run: Path, *options: str) -> str:
    wandb_file = next((run / "wandb").glob("offline-run-*/run-*.wandb"))
    command = [Path(sys.executable).with_name("wandb"), "leet", "inspect", *options, "--json", wandb_file]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def expected() -> set[str]:
    """The table of keys in docs/measures.md for a GPT-2 of four layers with every callback on, spelt out."""
    layers = [f"layer_{layer:02d}" for layer in range(4)]
    keys = {f"{family}/{name}/{p}" for family in FAMILIES for name in LIGHT for p in PROJECTIONS}
    keys |= {f"{family}/sigma2_{side}/{p}" for family in FAMILIES for side in ("in", "out") for p in PROJECTIONS}
    keys |= {f"gradient/gram_{side}/{p}" for side in ("in", "out") for p in PROJECTIONS}  # weights may be orthonormal
    keys |= {f"{name}/{p}" for name in ("update/relative_norm", "weight/cumulative_alignment") for p in PROJECTIONS}
    keys |= {f"softmax/{name}/{part}" for name in ATTENTION for part in (*layers, "mean", "worst_head")}
    keys |= {f"spectrum/{name}/{p}/{layer}" for name in SPECTRUM for p in PROJECTIONS for layer in layers}
    for name in ("certified_ratio", "tangent_residual", "manifold_residual", "update_rms"):
        keys |= {f"optim/{name}/{module}{end}" for module in ("attention", "mlp") for end in ("", "_worst")}
    keys |= {"optim/skipped_steps", "guard/events", "guard/first_step", "measure/skipped", "measure/milliseconds"}
    keys |= {"train/loss", "val/loss", "val/perplexity", "lr/muon", "lr/adamw"}
    return keys | {"throughput/samples_per_second", "throughput/tokens_per_second"}


def test_every_key_comes_back_and_rows_are_measured_steps(trained: dict[str, Path]) -> None:
    """A key that is renamed or lost on the way to W&B is missed only when somebody looks for it in a finished run."""
    run = trained["gpt2"]
    summary: dict[str, Any] = json.loads(inspect(run, "--summary"))
    known = summary["summary"].keys()
    assert expected() - known == set()
    assert {"weight/pairs", *(f"weight/heat_map/{p}" for p in PROJECTIONS)} <= known
    records = map(json.loads, inspect(run).splitlines())
    rows = [record["history"]["item"] for record in records if record["type"] == "history"]
    ours = read_metrics(run)
    steps = [row["trainer/global_step"] for row in rows]
    assert steps == sorted(steps)
    assert sorted(set(steps)) == [row["step"] for row in ours]
    for row in ours:
        sent: dict[str, Any] = {}
        for each in rows:
            sent |= each if each["trainer/global_step"] == row["step"] else {}
        others = (*OWN, "weight/heat_map", "weight/pairs")
        numbers = {key for key in sent if not key.startswith(others) and key != "trainer/global_step"}
        assert numbers == row.keys() - {"step"}, row["step"]


def test_every_key_has_one_panel_and_every_panel_a_key(trained: dict[str, Path]) -> None:
    """A panel whose pattern rots stays empty, and nobody misses it."""
    keys = {key for run in trained.values() for row in read_metrics(run) for key in row} - {"step", "epoch"}
    panels = [panel for section in SECTIONS.values() for panel in section]
    hits = {key: [panel.title for panel in panels if re.fullmatch(panel.pattern, key)] for key in keys}
    families = {panel.pattern.split("/")[0] for panel in panels}
    assert {key: found for key, found in hits.items() if len(found) != 1 and key.split("/")[0] in families} == {}
    assert {panel.title for panel in panels} == {title for found in hits.values() for title in found}
    assert list(SECTIONS) == ["continuity", "gradients", "attention", "spectra", "optimizer", "loss and speed"]
