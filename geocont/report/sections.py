"""What a report shows: the runs' keys and arrays sorted into sections of figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from geocont.report.figures import Figure, cells, curves, trajectory
from geocont.report.records import RunRecord
from geocont.report.series import (
    SIDE,
    Fineness,
    chance_levels,
    curves_of,
    expected_side,
    frames_of,
    heads_of,
    in_words,
    options_of,
    order_of,
    pairs_of,
    projections_of,
    signed,
    spectrum_of,
    stored,
    stored_vectors,
    thin,
)
from geocont.report.trajectories import through_depth

FAMILIES = {
    "weight": "weights",
    "gradient": "gradients",
    "cumulative": "cumulative gradients",
    "update": "updates W - W0",
}
#: Measures of neighbouring layers -> label with unit, and whether chance is drawn.
MEASURES = {
    "v1": "v1, |cos|",
    "u1": "u1, |cos|",
    "topk_in": "top-5 overlap, input side",
    "topk_out": "top-5 overlap, output side",
    "cosine": "cosine of the matrices",
    "sigma2_in": "sigma2, input side, |cos|",
    "sigma2_out": "sigma2, output side, |cos|",
    "gram_in": "Gram cosine, input side",
    "gram_out": "Gram cosine, output side",
    "gap": "s1 / s2",
    "defined": "share of pairs with s1/s2 >= 1.02",
}
#: How far and which way weights have gone, key without its projection -> label.
WAYS = {
    "update/relative_norm": "|W - W0| / |W0|",
    "weight/cumulative_alignment": "cumulative alignment, |cos|",
}
ATTENTION = {
    "entropy": "entropy, 1 = uniform",
    "saturated": "share of saturated rows",
    "max_logit": "largest |logit|",
    "top_probability": "top probability",
    "jacobian": "Jacobian norm of softmax",
    "logit_scale": "sigma(Wq) sigma(Wk) / sqrt(d)",
}
ATTENTION_FIRST = ("entropy", "saturated")
BOTH = "entropy and saturation"
SPECTRA = {
    "sigma_max": "largest singular value",
    "sigma_min": "smallest singular value",
    "condition": "condition number",
    "stable_rank": "stable rank",
    "gram_off_diagonal": "off-diagonal norm of Gram matrix",
    "column_norm_min": "smallest column norm",
    "column_norm_max": "largest column norm",
}
OPTIMIZER = {
    "certified_ratio": "certified share of the best descent",
    "tangent_residual": "tangent residual",
    "manifold_residual": "manifold residual",
    "update_rms": "RMS of the update",
}


@dataclass(frozen=True)
class Section:
    """A section: its figures and the selects that choose among them, label -> options, the first one shown first."""

    title: str
    text: str
    figures: list[Figure]
    selects: dict[str, list[str]] = field(default_factory=dict)


def sections(runs: Sequence[RunRecord], fineness: Fineness) -> list[Section]:
    """Returns the sections that the runs have anything for."""
    found = [
        loss_and_speed(runs, fineness),
        continuity(runs, fineness),
        heat_maps(runs, fineness),
        ways(runs, fineness),
        trajectories(runs, fineness),
        attention(runs, fineness),
        spectra(runs, fineness),
        optimizer(runs, fineness),
    ]
    return [section for section in found if section.figures]


def loss_and_speed(runs: Sequence[RunRecord], fineness: Fineness) -> Section:
    """Loss, accuracy or perplexity, learning rates, speed and the cost of measuring."""
    labels = {
        "train/loss": "training loss, nats",
        "val/loss": "validation loss, nats",
        "val/accuracy": "validation accuracy",
        "val/perplexity": "validation perplexity",
        "throughput/tokens_per_second": "tokens per second",
        "throughput/samples_per_second": "samples per second",
        "measure/milliseconds": "measuring, ms a measured step",
    }
    found = {
        key for run in runs for beginning in ("lr/", "train/", "val/", "throughput/") for key in run.keys(beginning)
    }
    labels |= {key: in_words(key) for key in sorted(found) if key not in labels}
    names = [run.name for run in runs]
    found_series = {key: curves_of(runs, key, fineness) for key in labels}
    figures = [curves(key, label, found_series[key], names) for key, label in labels.items() if found_series[key]]
    text = "Curves have a logarithmic step axis: what happens early is what tells runs apart."
    return Section("Loss and speed", text, figures)


def continuity(runs: Sequence[RunRecord], fineness: Fineness) -> Section:
    """The measures of neighbouring layers, mean over pairs, with chance levels."""
    figures, names = [], [run.name for run in runs]
    families = [name for name in FAMILIES if any(run.keys(f"{name}/v1/") for run in runs)]
    for family in families:
        for projection in projections_of(runs, f"{family}/v1/"):
            for measure, label in MEASURES.items():
                key = f"{family}/{measure}/{projection}"
                series = curves_of(runs, key, fineness)
                if series:
                    domain = None if measure == "gap" else [-1, 1] if signed(series) else [0, 1]
                    levels = chance_levels(runs, family, measure, projection)
                    choice = {"Of": [FAMILIES[family]], "Measure": [label, *expected_side(measure, projection)]}
                    figures.append(curves(key, label, series, names, domain=domain, levels=levels, choice=choice))
    selects = {"Of": [FAMILIES[name] for name in families], "Measure": options_of(figures, [SIDE, *MEASURES.values()])}
    text = (
        "How the matrices of adjacent layers line up: mean over all pairs of layers. Theory expects v1 to be high where"
        " a projection reads from the residual stream, u1 where it writes to it. Dotted: the level of unrelated random"
        " matrices. A leading direction is well defined only where s1/s2 is above 1.02."
    )
    return Section("Continuity through depth", text, figures, selects)


def heat_maps(runs: Sequence[RunRecord], fineness: Fineness) -> Section:
    """Projection x pair of layers, for each run, scrubbed through training."""
    shown = ("v1", "u1", "topk_in", "topk_out", "cosine")
    figures = []
    families = [name for name in FAMILIES if any(stored(runs, name, measure) for measure in shown)]
    for family in families:
        for measure in (SIDE, *shown):
            label = MEASURES.get(measure, "|cos|")
            for run in runs:
                keys = {
                    projection: f"{family}/{name}/{projection}"
                    for name, projection in stored([run], family, *(("v1", "u1") if measure == SIDE else (measure,)))
                    if measure != SIDE or expected_side(name, projection)
                }
                steps = frames_of([run], list(keys.values()), fineness)
                ordered = sorted(keys.items(), key=order_of) if steps else []
                series = [pairs_of(run, key, projection, steps) for projection, key in ordered]
                if series:
                    choice = {"Of": [FAMILIES[family]], "Measure": [MEASURES.get(measure, measure)]}
                    domain = [-1, 1] if measure == "cosine" else [0, 1]
                    axes: dict[str, Any] = {"rows": ("projection", "projection"), "columns": ("pair", "pair of layers")}
                    figures.append(cells(run.name, label, series, **axes, frames=steps, domain=domain, choice=choice))
    options = options_of(figures, [SIDE, *MEASURES.values()])
    selects = {"Of": [FAMILIES[name] for name in families], "Measure": options}
    text = (
        "Each cell is a pair of neighbouring layers. Dimmed with a cross: a leading direction that is hardly one, s1/s2"
        " below 1.02."
    )
    return Section("Pairs of layers", text, figures, selects)


def ways(runs: Sequence[RunRecord], fineness: Fineness) -> Section:
    """How far the weights have gone from where they started, and whether the gradients' sum tells the direction."""
    figures, names = [], [run.name for run in runs]
    for key, label in WAYS.items():
        for projection in projections_of(runs, f"{key}/"):
            series = curves_of(runs, f"{key}/{projection}", fineness)
            options: dict[str, Any] = {"choice": {"Measure": [label]}}
            if key.endswith("alignment"):
                options |= {"domain": [0, 1], "levels": chance_levels(runs, "weight", "v1", projection)}
            if series:
                figures.append(curves(f"{key}/{projection}", label, series, names, **options))
    selects = {"Measure": options_of(figures, list(WAYS.values()))}
    text = (
        "Means over layers. Relative norm: how far the matrices are from where they started. Alignment: v1 of a matrix"
        " and of the sum of its gradients, at the steps of full tables. Dotted: the level of unrelated random matrices."
    )
    return Section("Way of the weights", text, figures, selects)


def trajectories(runs: Sequence[RunRecord], fineness: Fineness) -> Section:
    """Leading singular vectors through depth, projected onto a plane, for each run."""
    figures = []
    for family, name in FAMILIES.items():
        for measure in ("v1", "u1"):
            for projection in stored_vectors(runs, family, measure):
                if not expected_side(measure, projection):
                    continue
                option = f"{measure} of {projection}, {name}"
                for run in runs:
                    steps = run.arrays.get(f"{family}/{measure}_vector/{projection}", {})
                    found = through_depth({step: steps[step] for step in thin(list(steps), fineness.frames)})
                    if found is not None:
                        labels = [str(layer) if layer in (0, found.layers - 1) else "" for layer in range(found.layers)]
                        series = [{"layer": list(range(found.layers)), "label": labels, "x": found.x, "y": found.y}]
                        axes = [f"component {i + 1} ({share:.0%})" for i, share in enumerate(found.shares)]
                        figures.append(trajectory(run.name, axes, series, found.steps, {"Vectors": [option]}))
    options = list(dict.fromkeys(figure.choice["Vectors"][0] for figure in figures))
    text = (
        "A point is the leading singular vector of a layer, projected onto the two principal directions of all layers'"
        " vectors at the last measurement (their share of the squares in brackets), not centred, signs aligned through"
        " depth. Vectors have length one: a point near the rim lies in the plane; points that coincide are one"
        " direction."
    )
    return Section("Singular vectors through depth", text, figures, {"Vectors": options})


def attention(runs: Sequence[RunRecord], fineness: Fineness) -> Section:
    """Entropy, saturation and logits of attention: over training, by layer, and by head."""
    figures, names = [], [run.name for run in runs]
    for measure, label in ATTENTION.items():
        choice = {"Measure": [label, *([BOTH] if measure in ATTENTION_FIRST else [])]}
        for part in ("mean", "worst_head"):
            series = curves_of(runs, f"softmax/{measure}/{part}", fineness)
            if series:
                figures.append(curves(f"softmax/{measure}/{part}", label, series, names, choice=choice))
        for run in runs:
            layers = [
                each | {"layer": int(key.rsplit("_", 1)[1])}
                for key in run.keys(f"softmax/{measure}/layer_")
                for each in curves_of([run], key, fineness, named=False)
            ]
            if layers:
                figures.append(curves(f"{run.name}: {label}, by layer", label, layers, by="layer", choice=choice))
        for run in runs:
            key = f"softmax/{measure}/heads"
            steps = frames_of([run], [key], fineness)
            if steps:
                axes: dict[str, Any] = {"rows": ("layer", "layer"), "columns": ("head", "head")}
                domain = [0, 1] if measure in ("entropy", "saturated", "top_probability") else None
                series = heads_of(run, key, steps)
                figures.append(
                    cells(
                        f"{run.name}: {label}, by head",
                        measure.replace("_", " "),
                        series,
                        **axes,
                        frames=steps,
                        domain=domain,
                        choice=choice,
                    )
                )
    selects = {"Measure": options_of(figures, [BOTH, *ATTENTION.values()])}
    text = (
        "A row is saturated where its largest probability exceeds 0.99; entropy is over the log of the number of"
        " visible keys. Worst is the head with the least entropy and Jacobian, and the most of everything else."
    )
    return Section("Attention", text, figures, selects)


def spectra(runs: Sequence[RunRecord], fineness: Fineness) -> Section:
    """Singular values of every matrix over training, for one run at a time."""
    figures, leading = [], "six largest singular values"
    for run in runs:
        for measure, label in SPECTRA.items():
            for projection in projections_of([run], f"spectrum/{measure}/"):
                layers = [
                    each | {"layer": int(key.rsplit("_", 1)[1])}
                    for key in run.keys(f"spectrum/{measure}/{projection}/layer_")
                    for each in curves_of([run], key, fineness, named=False)
                ]
                if layers:
                    positive = all(value is None or value > 0 for each in layers for value in each["value"])
                    choice = {"Run": [run.name], "Measure": [label]}
                    scale: Any = "log" if positive and measure == "condition" else "linear"
                    figures.append(curves(projection, label, layers, by="layer", scale=scale, choice=choice))
        for key in sorted(run.arrays, key=lambda key: order_of((key.rsplit("/", 1)[-1], key))):
            if key.startswith("weight/singular_values/"):
                steps = frames_of([run], [key], fineness)
                choice = {"Run": [run.name], "Measure": [leading]}
                axes: dict[str, Any] = {"rows": ("layer", "layer"), "columns": ("index", "singular value")}
                series = spectrum_of(run, key, steps)
                projection = key.rsplit("/", 1)[-1]
                figures.append(cells(projection, "value", series, **axes, frames=steps, domain=None, choice=choice))
    names = list(dict.fromkeys(figure.choice["Run"][0] for figure in figures))
    selects = {"Run": names, "Measure": options_of(figures, [*SPECTRA.values(), leading])}
    return Section("Spectra of the weights", "A curve, or a row of cells, for each layer.", figures, selects)


def optimizer(runs: Sequence[RunRecord], fineness: Fineness) -> Section:
    """How good the steps of Manifold Muon were, and how well its constraints held."""
    figures, names = [], [run.name for run in runs]
    for measure, label in OPTIMIZER.items():
        found = {key.split("/")[2].removesuffix("_worst") for run in runs for key in run.keys(f"optim/{measure}/")}
        for module in sorted(found):
            series = [
                each | {"kind": kind}
                for kind, end in (("mean", ""), ("worst matrix", "_worst"))
                for each in curves_of(runs, f"optim/{measure}/{module}{end}", fineness)
            ]
            positive = all(value is None or value > 0 for each in series for value in each["value"])
            scale: Any = "log" if measure.endswith("residual") and positive else "linear"
            if series:
                figures.append(curves(f"optim/{measure}/{module}", label, series, names, dash="kind", scale=scale))
    series = curves_of(runs, "optim/skipped_steps", fineness)
    if series and any(value for each in series for value in each["value"]):
        figures.append(curves("optim/skipped_steps", "steps left out so far", series, names))
    text = (
        "The certified share is what a step surely reached of the best descent under its constraint (1 is optimal);"
        " residuals say how far weights are from their manifold, and steps from its tangent space."
    )
    return Section("Optimizer", text, figures)


def chosen_at_first(section: Section) -> dict[str, str]:
    """Returns select -> option that is chosen at first: the first ones, or, where they show nothing, a figure's."""
    first = {label: options[0] for label, options in section.selects.items()}
    if any(_is_shown(figure, first) for figure in section.figures):
        return first
    return {label: section.figures[0].choice[label][0] for label in first}


def shown_at_first(section: Section) -> list[Figure]:
    """Returns the figures of a section that are shown before anything is chosen."""
    chosen = chosen_at_first(section)
    return [figure for figure in section.figures if _is_shown(figure, chosen)]


def _is_shown(figure: Figure, chosen: Mapping[str, str]) -> bool:
    return all(option in figure.choice.get(label, [option]) for label, option in chosen.items())
