"""Residual MLPs on digits: which ingredients make adjacent layers line up (arXiv 2605.04971, toy experiments)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from rich.console import Console

from geocont.conf import conf_folder
from geocont.experiments.results import curve, pick, publish, run_title
from geocont.experiments.runner import Grid, Runner, collect
from geocont.measures.continuity import alignment, chance
from geocont.report.plots import Curve, draw_curves, draw_table, save_figure
from geocont.report.tables import as_markdown, mean_and_spread, summarise_by_variant
from geocont.runs.store import read_arrays, read_metrics

WIDTH = 256  # of the hidden layers in conf/experiment/mlp
HEADER = (
    "variant",
    "seeds",
    "accuracy",
    "weight v1",
    "paper",
    "gradient v1, step 0",
    "paper",
    "v2",
    "v5",
    "top 5",
    "cosine",
    "s1/s2",
)


@dataclass(frozen=True)
class Variant:
    """One row of the table: its label, how it differs from ``res_relu.yaml``, what the paper reports (None: no figure).

    ``files`` are overlays below ``conf``, ``options`` further ones of ``geocont fit``.
    """

    label: str
    files: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    paper_weight_v1: float | None = None
    paper_gradient_v1_init: float | None = None


NONE = "experiment/mlp/res_none.yaml"
#: The paper's comparison, and what ``--variants`` trains by default.
CORE = {
    "res_relu": Variant("Res+ReLU"),
    "res_none": Variant("Res+None", (NONE,), (), 0.22, 0.93),
    "res_radial": Variant("Res+Radial", ("experiment/mlp/res_radial.yaml",), (), 0.22),
    "nores_tanh": Variant("NoRes+Tanh", ("experiment/mlp/nores_tanh.yaml",), (), 0.05, 0.05),
}


def _both(suffix: str, label: str, files: tuple[str, ...] = (), options: tuple[str, ...] = ()) -> dict[str, Variant]:
    """Returns a change to Res+ReLU and the same change to Res+None."""
    return {
        f"relu_{suffix}": Variant(f"Res+ReLU, {label}", files, options),
        f"none_{suffix}": Variant(f"Res+None, {label}", (NONE, *files), options),
    }


VARIANTS = CORE | {
    name: variant
    for more in (
        _both("pre_norm", "LayerNorm before", options=("--model.network.layer_norm=pre",)),
        _both("post_norm", "LayerNorm after", options=("--model.network.layer_norm=post",)),
        _both("small_init", "W0 deviation 0.003", options=("--model.network.scale=0.003",)),
        _both("large_init", "W0 deviation 0.06", options=("--model.network.scale=0.06",)),
        _both("default_init", "PyTorch's W0", options=("--model.network.initialisation=default",)),
        _both("beta2_zero", "Adam, beta2 = 0", ("optim/adam_beta2_zero.yaml",)),
        _both("sgd", "SGD", ("optim/sgd.yaml",)),
        _both("muon", "Muon", ("optim/muon.yaml",)),
    )
    for name, variant in more.items()
}
DEFAULT = tuple(CORE)


@dataclass(frozen=True)
class Preset:
    """Size of the experiment: data by default, seeds, epochs on digits and on MNIST."""

    data: str
    seeds: int
    digits_epochs: int
    mnist_epochs: int

    def epochs(self, data: str) -> int:
        """Returns the length of a training on some data."""
        return self.digits_epochs if data == "digits" else self.mnist_epochs


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
#: Singular vectors beside the first, index by index.
CONCENTRATION = tuple(f"weight_v{number}" for number in range(2, 6))
#: Columns of the figure of all variants, and their titles.
SHOWN = {
    "weight_v1": "weight v1",
    "weight_u1": "u1",
    "weight_v2": "v2",
    "weight_v5": "v5",
    "weight_topk_in": "top 5",
    "weight_cosine": "cosine",
    "gradient_v1_init": "gradient v1, step 0",
    "accuracy": "accuracy",
}


def _arguments(name: str, data: str, size: Preset) -> list[str]:
    variant = VARIANTS[name]
    return [*training_arguments(data, variant.files, size.epochs(data)), *variant.options]


def training_arguments(data: str, files: Sequence[str], epochs: int) -> list[str]:
    """Returns the options of a training of ``res_relu.yaml`` on other data, with overlays below ``conf``."""
    conf = conf_folder()
    arguments = ["--config", str(conf / "experiment/mlp/res_relu.yaml")]
    if data != "digits":
        arguments += ["--config", str(conf / "data/mnist.yaml"), "--data.path", data]
    arguments += [word for file in files for word in ("--config", str(conf / file))]
    return [*arguments, "--trainer.max_epochs", str(epochs)]


GRID = Grid("mlp", PRESETS, _arguments)
plan, jobs = GRID.plan, GRID.jobs


def describe(run_dir: Path) -> dict[str, Any]:
    """Returns the figures of one run, None where it has none."""
    rows = read_metrics(run_dir)
    figures: dict[str, Any] = {column: pick(rows, key, position) for column, (key, position) in COLUMNS.items()}
    stored = list(read_arrays(run_dir, "weight/v_vectors/hidden").values())
    if stored:
        vectors = torch.from_numpy(stored[-1])  # (L, width, 5)
        cosines = alignment(vectors[:-1].mT, vectors[1:].mT).mean(0).tolist()  # of each index
        figures |= {f"weight_v{number}": cosines[number - 1] for number in range(2, 6)}
    return figures | {"steps": rows[-1]["step"] if rows else 0}


def report(runner: Runner, console: Console) -> list[dict[str, Any]]:
    """Writes rows, table and figure below ``runner.out``, prints the table, and returns the rows of the ended runs."""
    rows = collect(runner, describe)
    if not rows:
        return []
    table = summarise_by_variant(rows, [*COLUMNS, *CONCENTRATION])
    out = runner.out
    for summary in table:
        variant = VARIANTS[summary["variant"]]
        summary["paper_weight_v1"] = variant.paper_weight_v1
        summary["paper_gradient_v1_init"] = variant.paper_gradient_v1_init
    figures = [_draw(runner, rows, out / "continuity.png")]
    if len(table) > len(CORE):
        figures.append(_draw_variants(runner, rows, table, out / "variants.png"))
    note = f"chance level of v1 at width {WIDTH}: {chance('v1', WIDTH):.3f}"
    publish(out, rows, table, as_markdown(HEADER, [_cells(summary) for summary in table]), note, figures, console)
    return rows


def _cells(summary: dict[str, Any]) -> list[str]:
    paper = [_figure(summary["paper_weight_v1"]), _figure(summary["paper_gradient_v1_init"])]
    measured = [mean_and_spread(summary, column) for column in ("accuracy", "weight_v1", "gradient_v1_init")]
    others = [
        mean_and_spread(summary, column)
        for column in ("weight_v2", "weight_v5", "weight_topk_in", "weight_cosine", "weight_gap")
    ]
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


def _draw(runner: Runner, rows: list[dict[str, Any]], path: Path) -> Path:
    """Draws v1 of weights and gradients over training, of the paper's comparison if it is there."""
    rows = [row for row in rows if row["variant"] in CORE] or rows
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    panels = (("weight/v1/hidden", "weights"), ("gradient/v1/hidden", "gradients of the step"))
    for axes, (key, title) in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
        groups: dict[str, list[Curve]] = {}
        for row in rows:
            groups.setdefault(VARIANTS[row["variant"]].label, []).append(curve(Path(row["run"]), key))
        draw_curves(axes, groups, title, "v1 of adjacent layers, |cos|", chance("v1", WIDTH))
        axes.label_outer()
    figure.axes[1].legend(loc="center left", fontsize=9)
    figure.suptitle(run_title(f"Residual MLP, 16 x {WIDTH}", runner, rows, ranges=True), fontsize=12)
    save_figure(figure, path)
    return path


def _draw_variants(runner: Runner, rows: list[dict[str, Any]], table: list[dict[str, Any]], path: Path) -> Path:
    """Draws the final measures of all variants as a coloured table."""
    values = np.array([[summary.get(column) for column in SHOWN] for summary in table], dtype=float)
    figure = Figure(figsize=(10, 1.6 + 0.34 * len(table)), layout="constrained")
    labels = [VARIANTS[summary["variant"]].label for summary in table]
    draw_table(figure.subplots(), labels, list(SHOWN.values()), values, np.zeros(values.shape, dtype=bool))
    figure.suptitle(run_title(f"Residual MLP, 16 x {WIDTH}", runner, rows), fontsize=12)
    save_figure(figure, path)
    return path
