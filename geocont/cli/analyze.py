"""``geocont analyze MODEL [MODEL ...]``: continuity of checkpoints through depth, on the terminal and in files."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geocont.cli.options import Parser, add_json_option, check_json_path, write_rows
from geocont.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from geocont.pretrained.advisor import Advice
    from geocont.pretrained.analysis import Analysis

#: Columns of the terminal's table: (heading, key of the summary, digits). {side} is the one of the theory.
WIDE_COLUMNS = (
    ("v1", "v1", 3),
    ("u1", "u1", 3),
    ("topk in", "topk_in", 3),
    ("topk out", "topk_out", 3),
    ("sigma2 in", "sigma2_in", 3),
    ("sigma2 out", "sigma2_out", 3),
    ("gram in", "gram_in", 3),
    ("gram out", "gram_out", 3),
    ("cosine", "cosine", 3),
    ("s1/s2", "gap", 2),
    ("defined", "defined", 2),
)
COLUMNS = (
    ("v1", "v1", 3),
    ("u1", "u1", 3),
    ("topk", "topk_{side}", 3),
    ("gram", "gram_{side}", 3),
    ("s1/s2", "gap", 2),
    ("defined", "defined", 2),
)
#: A table that fits 80 columns.
LOOK: dict[str, Any] = {"box": None, "padding": (0, 1), "pad_edge": False, "header_style": "bold"}
WIDE = 130  # columns of a terminal from which on both sides of everything fit


def run(command: str, arguments: Sequence[str]) -> int:
    """Runs ``geocont analyze``; returns 1 where a matrix had no directions and its rows are marked."""
    options = _parser().parse_args(arguments)
    if options.exact_side < 1:
        raise UserError(f"--exact-side must be at least 1, got {options.exact_side}")
    if options.run_length < 2:
        raise UserError(f"--run-length must be at least 2, got {options.run_length}")
    check_json_path(options.json)
    return _analyze(options)


def _parser() -> Parser:
    parser = Parser(
        prog="geocont analyze",
        description="Measure how the leading directions of adjacent layers line up in any checkpoint, one matrix in"
        " memory at a time. A stopped analysis goes on when the same command is given again.",
    )
    parser.add_argument(
        "models",
        metavar="MODEL",
        nargs="+",
        help="a safetensors, GGUF or PyTorch file; a folder with config.json; a geocont run; or owner/model on the"
        " Hugging Face hub (a token is taken from HF_TOKEN only)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="folder of tables and figures, which are replaced (default: runs/analyze/MODEL, or MODEL-against-BASE)",
    )
    add_json_option(parser)
    parser.add_argument("--revision", help="branch, tag or commit on the hub")
    parser.add_argument("--against", metavar="BASE", help="analyse what separates each MODEL from this checkpoint")
    parser.add_argument("--map", type=Path, metavar="FILE", help="YAML: where the matrices of each projection lie")
    parser.add_argument(
        "--fold-norms", action="store_true", help="multiply matrices by the norm weights before and after them"
    )
    parser.add_argument("--projections", nargs="+", metavar="NAME", help="only these of q k v o gate up down (all)")
    parser.add_argument(
        "--light", action="store_true", help="v1, u1, topk, cosine, gap only; leaves out what needs whole spectra"
    )
    parser.add_argument(
        "--exact-side",
        type=int,
        default=1024,
        metavar="N",
        help="matrices whose smaller side exceeds N get sigma2, gram and effective rank as estimates with error bars"
        " (default: 1024)",
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument(
        "--advise", action="store_true", help="also: bases that layers could share, and layers ranked for pruning"
    )
    parser.add_argument(
        "--run-length", type=int, default=4, metavar="N", help="adjacent layers that share a basis (default: 4)"
    )
    parser.add_argument("--wandb", action="store_true", help="also log to Weights & Biases; works offline")
    return parser


def _analyze(options: Namespace) -> int:
    from rich.console import Console

    from geocont.pretrained.analysis import Analysis

    console = Console(highlight=False)
    if len({str(Path(model).resolve()) for model in options.models}) < len(options.models):
        raise UserError("a MODEL is given twice")
    out = options.out or Path("runs/analyze") / "-".join(
        [
            *(_file_name(Path(model).name) for model in options.models),
            *(["against", _file_name(Path(options.against).name)] if options.against else []),
        ]
    )
    analyses: list[Analysis] = []
    try:
        for model in options.models:
            analyses.append(Analysis(str(model)))
            _one(model, options, out, console, analyses[-1])
    except UserError as error:
        raise _with_finished_rows(error, out, analyses) from error
    _name_apart(analyses, options.models)
    for analysis in analyses:
        _print_analysis(console, analysis)
    if len(analyses) > 1:
        _print_side_by_side(console, analyses)
    written = _write(out, analyses)
    advices = [_advise(model, options, out, console, a) for model, a in zip(options.models, analyses, strict=True)]
    if options.wandb:
        _log_to_wandb(out, analyses)
    rows = [row for analysis in analyses for row in analysis.rows]
    write_rows(options.json, _plain(rows))
    console.print(f"\ntables    {written[0]}, csv, json; spectra.parquet; summary.json", soft_wrap=True)
    console.print(f"figures   {out / 'figures'}", soft_wrap=True)
    if any(advices):
        console.print(f"advice    {out / 'advice.md'}", soft_wrap=True)
    return 1 if any(analysis.marked for analysis in analyses) else 0


def _one(model: str, options: Namespace, out: Path, console: Console, into: Analysis) -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from geocont.pretrained import analyze

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not sys.stdout.isatty()) as bar:
        task = bar.add_task(str(model), total=None)

        def show(done: int, total: int, name: str) -> None:
            bar.update(task, completed=done, total=total, description=f"{into.model} {name}")

        analyze(
            model,
            against=options.against,
            revision=options.revision,
            own_map=options.map,
            fold_norms=options.fold_norms,
            projections=options.projections,
            light=options.light,
            exact_side=options.exact_side,
            device=options.device,
            cache=out / "cache",
            progress=show,
            into=into,
        )


def _with_finished_rows(error: UserError, out: Path, analyses: Sequence[Analysis]) -> UserError:
    """Writes the rows there are and returns the error with where they lie."""
    from geocont.pretrained.output import write_tables

    count = sum(len(analysis.rows) for analysis in analyses)
    if not count:
        return error
    try:
        write_tables(out, analyses)
    except UserError:
        return UserError(f"{error}; {count} finished rows are kept in {out / 'cache'}")
    return UserError(f"{error}; the {count} rows finished before are in {out / 'rows.csv'}")


def _name_apart(analyses: Sequence[Analysis], models: Sequence[str]) -> None:
    """Gives models of one name as much of their paths as tells them apart, in rows too."""
    names = [analysis.model for analysis in analyses]
    parts = 1
    while len(set(names)) < len(names) and parts < 20:
        parts += 1
        names = [
            "/".join(Path(path).resolve().parts[-parts:]) if names.count(name) > 1 else name
            for name, path in zip(names, models, strict=True)
        ]
    for analysis, name in zip(analyses, names, strict=True):
        analysis.model = name
        for row in (*analysis.rows, *analysis.spectra):
            row["model"] = name


def _print_analysis(console: Console, analysis: Analysis) -> None:
    from rich.table import Table

    summaries = analysis.summary
    wide = console.width >= WIDE
    layers = max(summary["layers"] for summary in summaries.values())
    table = Table(
        title=f"{analysis.model} ({analysis.family}, {layers} layers): means over adjacent pairs",
        title_justify="left",
        **LOOK,
    )
    table.add_column("")
    table.add_column("out x in", justify="right", no_wrap=True)
    columns = []
    for heading, key, digits in WIDE_COLUMNS if wide else COLUMNS:
        if any(_value(summary, key) is not None for summary in summaries.values()):
            columns.append((key, digits))
            table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("chance", justify="right", no_wrap=True)
    table.add_column("distant", justify="right", no_wrap=True)
    for projection, summary in summaries.items():
        cells = [projection, f"{summary['rows']}x{summary['columns']}"]
        for key, digits in columns:
            value = _value(summary, key)
            text = "-" if value is None else f"{value:.{digits}f}"
            cells.append(f"[bold green]{text}[/]" if key in summary["theory"].split() else text)
        side = summary["theory"].split()[0]
        cells += [f"{summary[f'chance_{side}']:.3f}", _number(summary.get(f"{side}_distant"))]
        table.add_row(*cells)
    console.print()
    console.print(table)
    console.print(
        f"green: the side where theory expects continuity{'' if wide else ', which topk and gram are of'}; chance:"
        " of it for random matrices; distant: of it between layers that are not adjacent; defined: share of pairs with"
        " s1/s2 >= 1.02",
        style="dim",
    )
    for note in analysis.notes:
        console.print(f"note: {note}", soft_wrap=True)


def _value(summary: dict[str, Any], key: str) -> Any:
    return summary.get(key.format(side="out" if summary["theory"] == "u1" else "in"))


def _print_side_by_side(console: Console, analyses: Sequence[Analysis]) -> None:
    from rich.table import Table

    table = Table(title="theory's side (v1 of readers, u1 of writers)", title_justify="left", **LOOK)
    table.add_column("")
    for analysis in analyses:
        table.add_column(analysis.model, justify="right", overflow="fold")
    for projection in dict.fromkeys(p for analysis in analyses for p in analysis.summary):
        found = [analysis.summary.get(projection) for analysis in analyses]
        table.add_row(projection, *(_number(s[s["theory"].split()[0]]) if s else "-" for s in found))
    console.print()
    console.print(table)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _write(out: Path, analyses: Sequence[Analysis]) -> list[Path]:
    from geocont.pretrained.figures import comparison, pair_map, trajectories
    from geocont.pretrained.output import write_tables
    from geocont.report.plots import save_figure

    written = write_tables(out, analyses)
    try:
        for analysis in analyses:
            name = _file_name(analysis.model)
            save_figure(pair_map(analysis), out / "figures" / f"{name}-pairs.png")
            save_figure(trajectories(analysis), out / "figures" / f"{name}-trajectories.png")
        if len(analyses) > 1:
            save_figure(comparison(analyses), out / "figures" / "comparison.png")
    except OSError as error:
        raise UserError(f"--out: {out} cannot be written: {error.strerror or error}") from error
    return written


def _advise(model: str, options: Namespace, out: Path, console: Console, analysis: Analysis) -> Advice | None:
    if not options.advise:
        return None
    import torch
    from rich.table import Table

    from geocont.pretrained.advisor import LIMITS, advise
    from geocont.pretrained.analysis import find_model
    from geocont.pretrained.figures import advice_figure
    from geocont.pretrained.output import advice_table, write_advice
    from geocont.report.plots import save_figure

    found, _ = find_model(
        model, options.against, options.revision, options.map, options.fold_norms, options.projections
    )
    with console.status(f"{analysis.model}: shared bases"):
        advice = advise(found, analysis, torch.device(options.device), options.run_length)
    several = len(options.models) > 1
    folder = out / _file_name(analysis.model) if several else out
    write_advice(folder, advice, LIMITS)
    save_figure(advice_figure(advice, analysis.model), folder / "figures" / "advice.png")
    header, body = advice_table(advice)
    title = f"{analysis.model}: a basis shared by {options.run_length} adjacent layers"
    table = Table(*header, title=title, title_justify="left", **LOOK)
    for line in body:
        table.add_row(*line)
    console.print()
    console.print(table)
    best = ", ".join(f"{row['layer']} ({row['score']:.2f})" for row in advice.layers[:8])
    console.print(f"pruning candidates, most like their neighbours first: layers {best}", soft_wrap=True)
    console.print(LIMITS, style="dim")
    return advice


def _log_to_wandb(out: Path, analyses: Sequence[Analysis]) -> None:
    from geocont.runs.wandb import WandbRunLogger

    for analysis in analyses:
        logger = WandbRunLogger(name=_file_name(analysis.model), run_dir=str(out), job_type="analyze")
        logger.add_config({"model": analysis.model, "family": analysis.family, "notes": analysis.notes})
        for layer in sorted({row["layer"] for row in analysis.rows}):
            values = {
                f"weight/{measure}/{row['projection']}": row[measure]
                for row in analysis.rows
                if row["layer"] == layer and not row.get("expert")
                for measure in ("v1", "u1", "topk_in", "topk_out", "cosine", "gap", "gram_in", "gram_out")
                if row.get(measure) is not None
            }
            logger.log_metrics(values, step=layer)  # the x axis is the layer
        for kind in ("pairs", "trajectories"):
            logger.log_image(kind, [str(out / "figures" / f"{_file_name(analysis.model)}-{kind}.png")])
        logger.finish()


def _plain(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    from geocont.pretrained.output import plain

    return [plain(row) for row in rows]


def _file_name(model: str) -> str:
    """Returns a model's name as part of a file's name."""
    return re.sub(r"[^\w.+-]+", "_", re.sub(r"\.(safetensors|gguf|bin|pt|pth|ckpt)$", "", model)).strip("_") or "model"
