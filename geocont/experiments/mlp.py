"""Residual MLPs on digits: which ingredients make adjacent layers line up (arXiv 2605.04971, toy experiments)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console

from geocont.conf import conf_folder
from geocont.experiments.results import absolute, curve, pick, publish, run_title
from geocont.experiments.runner import Job, Runner, collect, seed_by_seed
from geocont.measures.continuity import chance
from geocont.report.plots import Curve, draw_curves, save_figure
from geocont.report.tables import as_markdown, mean_and_spread, summarise_by_variant
from geocont.runs.store import read_metrics

WIDTH = 256  # of the hidden layers in conf/experiment/mlp
HEADER = (
    "variant",
    "seeds",
    "accuracy",
    "weight v1",
    "paper",
    "gradient v1, step 0",
    "paper",
    "top 5",
    "cosine",
    "s1/s2",
)


@dataclass(frozen=True)
class Variant:
    """One row of the table: its label, its overlay of ``res_relu.yaml``, what the paper reports (None: no figure)."""

    label: str
    overlay: str | None
    paper_weight_v1: float | None
    paper_gradient_v1_init: float | None


VARIANTS = {
    "res_relu": Variant("Res+ReLU", None, None, None),
    "res_none": Variant("Res+None", "res_none.yaml", 0.22, 0.93),
    "res_radial": Variant("Res+Radial", "res_radial.yaml", 0.22, None),
    "nores_tanh": Variant("NoRes+Tanh", "nores_tanh.yaml", 0.05, 0.05),
}


@dataclass(frozen=True)
class Preset:
    """Size of the experiment: data by default, seeds, epochs on digits and on MNIST."""

    data: str
    seeds: int
    digits_epochs: int
    mnist_epochs: int


PRESETS = {
    "smoke": Preset("digits", 1, 2, 1),
    "cpu": Preset("digits", 3, 84, 12),
    "paper": Preset("ylecun/mnist", 5, 84, 12),
}

#: Columns of the rows beside variant and seed: name -> (key, whether the first row counts or the last).
COLUMNS = {
    "accuracy": ("val/accuracy", -1),
    "weight_v1": ("weight/v1/hidden", -1),
    "weight_u1": ("weight/u1/hidden", -1),
    "weight_topk_in": ("weight/topk_in/hidden", -1),
    "weight_sigma2_in": ("weight/sigma2_in/hidden", -1),
    "weight_gram_in": ("weight/gram_in/hidden", -1),
    "weight_cosine": ("weight/cosine/hidden", -1),
    "weight_gap": ("weight/gap/hidden", -1),
    "weight_defined": ("weight/defined/hidden", -1),
    "gradient_v1_init": ("gradient/v1/hidden", 0),
    "gradient_v1": ("gradient/v1/hidden", -1),
    "cumulative_v1": ("cumulative/v1/hidden", -1),
    "update_v1": ("update/v1/hidden", -1),
    "train_loss": ("train/loss", -1),
}


def plan(preset: str, data: str | None) -> dict[str, Any]:
    """Returns what identifies the experiment: runs of another plan do not belong into the same folder."""
    return {"experiment": "mlp", "preset": preset, "data": absolute(data or PRESETS[preset].data)}


def jobs(preset: str, data: str | None, variants: Sequence[str], seeds: int | None) -> list[Job]:
    """Returns the trainings of the experiment, seed by seed, so that a first comparison is there early."""
    size = PRESETS[preset]
    source = absolute(data or size.data)
    return seed_by_seed(variants, size.seeds if seeds is None else seeds, lambda name: _arguments(name, source, size))


def _arguments(name: str, data: str, size: Preset) -> list[str]:
    conf = conf_folder()
    arguments = ["--config", str(conf / "experiment/mlp/res_relu.yaml")]
    if data != "digits":
        arguments += ["--config", str(conf / "data/mnist.yaml"), "--data.path", data]
    overlay = VARIANTS[name].overlay
    if overlay:
        arguments += ["--config", str(conf / "experiment/mlp" / overlay)]
    epochs = size.digits_epochs if data == "digits" else size.mnist_epochs
    return [*arguments, "--trainer.max_epochs", str(epochs)]


def describe(run_dir: Path) -> dict[str, Any]:
    """Returns the figures of one run, None where it has none."""
    rows = read_metrics(run_dir)
    figures = {column: pick(rows, key, position) for column, (key, position) in COLUMNS.items()}
    return figures | {"steps": rows[-1]["step"] if rows else 0}


def report(runner: Runner, console: Console) -> list[dict[str, Any]]:
    """Writes rows, table and figure below ``runner.out``, prints the table, and returns the rows of the ended runs."""
    rows = collect(runner, describe)
    if not rows:
        return []
    table = summarise_by_variant(rows, list(COLUMNS))
    out = runner.out
    for summary in table:
        variant = VARIANTS[summary["variant"]]
        summary["paper_weight_v1"] = variant.paper_weight_v1
        summary["paper_gradient_v1_init"] = variant.paper_gradient_v1_init
    figure = out / "continuity.png"
    _draw(runner, rows, figure)
    note = f"chance level of v1 at width {WIDTH}: {chance('v1', WIDTH):.3f}"
    publish(out, rows, table, as_markdown(HEADER, [_cells(summary) for summary in table]), note, [figure], console)
    return rows


def _cells(summary: dict[str, Any]) -> list[str]:
    paper = [_figure(summary["paper_weight_v1"]), _figure(summary["paper_gradient_v1_init"])]
    measured = [mean_and_spread(summary, column) for column in ("accuracy", "weight_v1", "gradient_v1_init")]
    others = [mean_and_spread(summary, column) for column in ("weight_topk_in", "weight_cosine", "weight_gap")]
    runs = f"{summary['seeds']}" + (f" ({summary['failed']} failed)" if summary["failed"] else "")
    return [
        VARIANTS[summary["variant"]].label,
        runs,
        measured[0],
        measured[1],
        paper[0],
        measured[2],
        paper[1],
        *others,
    ]


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _draw(runner: Runner, rows: list[dict[str, Any]], path: Path) -> None:
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    panels = (("weight/v1/hidden", "weights"), ("gradient/v1/hidden", "gradients of the step"))
    for axes, (key, title) in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
        groups: dict[str, list[Curve]] = {}
        for row in rows:
            groups.setdefault(VARIANTS[row["variant"]].label, []).append(curve(Path(row["run"]), key))
        draw_curves(axes, groups, title, "v1 of adjacent layers, |cos|", chance("v1", WIDTH))
        axes.label_outer()
    figure.axes[1].legend(loc="center left", fontsize=9)
    figure.suptitle(run_title(f"Residual MLP, 16 x {WIDTH}", runner, rows) + ", and their range", fontsize=12)
    save_figure(figure, path)
