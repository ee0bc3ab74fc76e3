"""What all commands share: an argument parser whose errors are one line and name the nearest valid option."""

from __future__ import annotations

import argparse
import difflib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from geocont.errors import UserError


def nearest(word: str, valid: Iterable[str]) -> str:
    """Returns ``; did you mean X?`` with the valid word nearest to ``word``, or nothing if none is near."""
    found = difflib.get_close_matches(word, list(valid), n=1, cutoff=0.6)
    return f"; did you mean {found[0]}?" if found else ""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises :class:`UserError` with the nearest valid option instead of printing its usage."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["allow_abbrev"] = False
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Raises the message as a :class:`UserError`."""
        unknown = re.search(r"unrecognized arguments: (\S+)", message)
        options = [option for action in self._actions for option in action.option_strings]
        invalid = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if unknown:
            message += nearest(unknown[1].split("=")[0], options)
        elif invalid:
            message += nearest(invalid[1], re.findall(r"[\w-]+", invalid[2]))
        raise UserError(message)


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Adds ``--json FILE`` to a command that reports figures."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures as a list of flat rows")


def check_json_path(path: Path | None) -> None:
    """Raises a :class:`UserError`, before hours of work, if rows could not be written there."""
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8"):
                pass
        except OSError as error:
            raise UserError(f"--json: {path} cannot be written: {error.strerror}") from error


def write_rows(path: Path | None, rows: Sequence[dict[str, Any]]) -> None:
    """Writes rows for ``--json``, if a file was asked for."""
    if path is not None:
        path.write_text(json.dumps(list(rows), indent=1) + "\n", encoding="utf-8")


def words(text: str) -> list[str]:
    """Splits ``a,b c`` into words, for options that take several."""
    return [word for word in re.split(r"[,\s]+", text) if word]
