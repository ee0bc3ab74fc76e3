"""``geocont reproduce EXPERIMENT``: a paper's experiment over variants and seeds, as one table and one figure."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path

from geocont.cli.options import Parser, add_json_option, check_json_path, nearest, words, write_rows
from geocont.errors import UserError

EXPERIMENTS = {"mlp": "residual MLPs: what makes adjacent layers line up (arXiv 2605.04971)"}


def run(command: str, arguments: Sequence[str]) -> int:
    """Runs ``geocont reproduce``."""
    parser = Parser(prog="geocont reproduce", description="Repeat an experiment of a paper; see EXPERIMENT --help.")
    parser.add_argument("experiment", metavar="EXPERIMENT", choices=EXPERIMENTS, help=_list_of_experiments())
    parser.parse_args(arguments[:1])
    return _mlp(_mlp_parser().parse_args(arguments[1:]))


def _list_of_experiments() -> str:
    return "; ".join(f"{name}: {what}" for name, what in EXPERIMENTS.items())


def _mlp_parser() -> Parser:
    parser = Parser(prog="geocont reproduce mlp", description=EXPERIMENTS["mlp"])
    parser.add_argument(
        "--preset",
        choices=("smoke", "cpu", "paper"),
        default="cpu",
        help="smoke: a minute; cpu: 3,700 steps a run, three seeds; paper: all of MNIST, five seeds (default: cpu)",
    )
    parser.add_argument(
        "--data", help="digits, a folder of MNIST as parquet, or a name on the hub (default: the preset's)"
    )
    parser.add_argument(
        "--variants", nargs="+", default=["all"], help="some of res_relu res_none res_radial nores_tanh (default: all)"
    )
    parser.add_argument("--seeds", type=int, help="number of seeds (default: the preset's)")
    parser.add_argument("--out", type=Path, help="folder of everything (default: runs/reproduce/mlp-PRESET)")
    parser.add_argument("--jobs", type=int, help="trainings at a time (default: as many as cores)")
    add_json_option(parser)
    return parser


def _mlp(options: Namespace) -> int:
    from rich.console import Console

    from geocont.experiments import mlp
    from geocont.experiments.runner import Runner
    from geocont.report.summary import leet_command

    check_json_path(options.json)
    variants = choose(options.variants, mlp.VARIANTS)
    out = options.out or Path("runs/reproduce") / f"mlp-{options.preset}"
    jobs = mlp.jobs(options.preset, options.data, variants, options.seeds)
    runner = Runner(out, mlp.plan(options.preset, options.data), jobs, options.jobs)
    console = Console(highlight=False)
    console.print(f"{len(jobs)} runs; live: {leet_command(runner.folder(jobs[0]) / 'wandb')}", soft_wrap=True)
    runner.run(console)
    rows = mlp.report(runner, console)
    write_rows(options.json, rows)
    return 0 if len(rows) == len(jobs) else 1


def choose(given: Sequence[str], valid: Iterable[str]) -> list[str]:
    """Returns the chosen variants, in the order of ``valid``.

    Raises:
        UserError: One of them does not exist; the message names the nearest one.
    """
    valid = list(valid)
    wanted = [word for text in given for word in words(text)]
    if not wanted:
        raise UserError(f"--variants: name some of {', '.join(valid)}")
    for word in wanted:
        if word not in valid and word != "all":
            raise UserError(f"--variants: {word!r} is none of {', '.join(valid)}{nearest(word, valid)}")
    return [name for name in valid if name in wanted or "all" in wanted]
