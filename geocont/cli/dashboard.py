"""``geocont dashboard``: a saved W&B workspace with geocont's panels in their sections."""

from __future__ import annotations

import json
from collections.abc import Sequence

from geocont.cli.options import Parser


def run(command: str, arguments: Sequence[str]) -> int:
    """Runs ``geocont dashboard``."""
    options = _parser().parse_args(arguments)
    from geocont.report.dashboard import as_plain, save, workspace

    if options.dry_run:
        print(json.dumps(as_plain(workspace(options.project, options.entity or "", options.name)), indent=1))
    else:
        print(f"saved: {save(options.project, options.entity, options.name)}")
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="geocont dashboard",
        description="Save a W&B workspace whose panels need no arranging: continuity, gradients, attention, spectra,"
        " optimizer, loss and speed, over optimizer steps. (Needs the extra geocont[dashboard] and a W&B account;"
        " without one, `wandb leet RUN/wandb` and `geocont report RUN` show the same.)",
    )
    parser.add_argument("--project", default="geocont", help="W&B project, as in --logger.wandb.project (geocont)")
    parser.add_argument("--entity", help="W&B user or team (default: the account's)")
    parser.add_argument("--name", default="geocont", help="name of the saved view (geocont)")
    parser.add_argument("--dry-run", action="store_true", help="print what would be sent, as JSON, without a request")
    return parser
