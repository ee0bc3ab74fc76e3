"""The ``geocont`` command.

Only this module is imported before the command is known: ``geocont --help`` and the help of commands that do not train
load neither torch nor lightning.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from geocont import __version__
from geocont.cli.options import nearest
from geocont.errors import UserError

#: Command -> (module with a ``run(command, arguments)``, what it does).
COMMANDS: dict[str, tuple[str, str]] = {
    "fit": ("geocont.cli.training", "train a model; callbacks, loggers and everything else from YAML and options"),
    "validate": ("geocont.cli.training", "evaluate a checkpoint on the validation data"),
    "test": ("geocont.cli.training", "evaluate a checkpoint on the test data"),
    "predict": ("geocont.cli.training", "predict with a checkpoint"),
    "reproduce": (
        "geocont.cli.reproduce",
        "repeat an experiment of a paper over variants and seeds; a table and a figure",
    ),
    "report": ("geocont.cli.report", "write one HTML page (or PNG figures) about runs; needs no network to read"),
    "dashboard": ("geocont.cli.dashboard", "save a W&B workspace with geocont's panels, or print it"),
    "sweep": ("geocont.cli.sweep", "train a grid of options without an account; a table and a figure"),
    "analyze": ("geocont.cli.analyze", "measure the continuity of any checkpoint through depth, one matrix at a time"),
    "bench": ("geocont.cli.bench", "measure what geocont's parts cost on this machine"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status: 0, 2 for an error of the user's, or what the command returns."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if not arguments or arguments[0] in ("-h", "--help"):
            print(overview())
            return 0
        if arguments[0] == "--version":
            print(f"geocont {__version__}")
            return 0
        command, *rest = arguments
        if command not in COMMANDS:
            raise UserError(f"{command!r} is not a command{nearest(command, COMMANDS)}; see geocont --help")
        return importlib.import_module(COMMANDS[command][0]).run(command, rest) or 0
    except KeyboardInterrupt:
        print("geocont: interrupted", file=sys.stderr)
        return 130
    except UserError as error:
        print(f"geocont: error: {error}", file=sys.stderr)
        return 2


def overview() -> str:
    """Returns the text of ``geocont --help``."""
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {command:{width}}{what}" for command, (_, what) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: geocont COMMAND [OPTIONS]",
            "",
            "A PyTorch Lightning laboratory for the geometry of weight space.",
            "",
            "commands:",
            *lines,
            "",
            "geocont COMMAND --help shows the options of a command. A first run:",
            "  geocont fit --config conf/experiment/mlp/res_relu.yaml",
        ]
    )
