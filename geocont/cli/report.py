"""``geocont report RUN [RUN ...]``: one HTML file about runs, to read, scrub through and send to a colleague."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from geocont.cli.options import Parser
from geocont.errors import UserError


def run(command: str, arguments: Sequence[str]) -> int:
    """Runs ``geocont report``."""
    options = _parser().parse_args(arguments)
    from geocont.report.records import read_runs  # takes torch with it

    runs = read_runs(options.runs)
    kind = options.format
    out: Path = options.out or options.runs[0] / ("report.html" if kind == "html" else "report")
    try:
        if kind == "png":
            from geocont.report.images import write_images

            written = write_images(runs, out)
            print(f"{len(written)} figures: {out}")
        else:
            from geocont.report.page import render
            from geocont.runs.files import write_atomically

            page = render(runs)
            out.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(out, page)
            print(f"{out} ({len(page.encode()) / 1e6:.1f} MB)")
    except OSError as error:
        raise UserError(f"--out: {out} cannot be written: {error.strerror}") from error
    for each in runs:
        for problem in each.problems:
            print(f"{each.name}: {problem}")
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="geocont report",
        description="Write a report of one or more runs, whatever state they are in: curves with chance levels, heat"
        " maps and singular vectors scrubbed through training, attention, spectra, optimizer, guard events and where"
        " configurations differ. The HTML file needs no network. (Needs the extra geocont[report].)",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="directory of a run, runs/EXPERIMENT/NAME")
    parser.add_argument(
        "--out", type=Path, help="file to write, or folder with --format png (default: report.html or report/ in RUN)"
    )
    parser.add_argument(
        "--format",
        choices=("html", "png"),
        default="html",
        help="html: one page; png: an image for each figure that the page shows at first (default: html)",
    )
    return parser
