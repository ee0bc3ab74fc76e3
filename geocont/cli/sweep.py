"""``geocont sweep FILE``: the grid of a W&B sweep file without an account, stopped and started again at any time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from geocont.cli.options import Parser, add_json_option, check_json_path, write_rows


def run(command: str, arguments: Sequence[str]) -> int:
    """Runs ``geocont sweep``; returns 1 where trainings are left that did not end."""
    options = _parser().parse_args(arguments)
    check_json_path(options.json)
    from rich.console import Console

    from geocont.experiments import sweep
    from geocont.experiments.runner import Runner
    from geocont.report.summary import leet_command

    found = sweep.read_sweep(options.file)
    jobs = sweep.jobs(found)
    runner = Runner(options.out or Path("runs/sweep") / found.name, sweep.plan(found), jobs, options.jobs)
    console = Console(highlight=False)
    console.print(f"{len(jobs)} runs; live: {leet_command(runner.folder(jobs[0]) / 'wandb')}", soft_wrap=True)
    runner.run(console)
    rows = sweep.report(found, runner, console)
    write_rows(options.json, rows)
    return 0 if len(rows) == len(jobs) else 1


def _parser() -> Parser:
    parser = Parser(
        prog="geocont sweep",
        description="Train every combination of a W&B sweep file's values here, without an account: each in its own"
        " directory and process. What has ended is kept, what was stopped goes on. Writes table.md, table.csv,"
        " runs.csv and a figure. (With an account, `wandb sweep FILE` and `wandb agent` run the same file.)",
    )
    parser.add_argument("file", metavar="FILE", help="sweep file with method: grid, such as conf/sweep/*.yaml")
    parser.add_argument("--out", type=Path, help="folder of everything (default: runs/sweep/NAME-OF-FILE)")
    parser.add_argument("--jobs", type=int, help="trainings at a time (default: as many as cores)")
    add_json_option(parser)
    return parser
