"""The parser behind ``geocont fit``: errors are one line that names the key, the value and the nearest valid one."""

from __future__ import annotations

import re
from typing import Any, NoReturn

from lightning.pytorch.cli import LightningArgumentParser

from geocont.cli.options import nearest
from geocont.errors import UserError

#: Lines of a jsonargparse message that say how it tried, not what is wrong.
_HOW = re.compile(r"Does not validate|Subtypes:|Errors:|Given value|(- )?Expected a (path but|<class 'NoneType'>)")
_GIVEN = re.compile(r"Given value: (.+)")
_TYPE = re.compile(r"<class '(?:\w+\.)*(\w+)'>|typing\.")
_KEY = re.compile(r"(?:- )?Parser key ['\"]([^'\"]+)['\"]:\s*")
_UNKNOWN = re.compile(r"(?:unrecognized arguments: -*|[Oo]ption ['\"]|[Kk]ey ['\"]?)([\w.]+)['\"]?.*(?:not|unrecogni)?")
_CHOICE = re.compile(r"Literal\[(.*?)\]\. Got value: (\S+)")


class GeoContParser(LightningArgumentParser):
    """LightningArgumentParser that raises :class:`UserError` instead of printing usage, and takes no abbreviations."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.allow_abbrev = False  # an abbreviation is a misspelling that happens to be unique today

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raises the message, with the nearest valid key or value, as a :class:`UserError`."""
        raise UserError(essence(message) + self._hint(message)) from ex

    def _hint(self, message: str) -> str:
        if re.search(r"arguments are required: \w+\.model$", message):
            return "; an experiment has one, for example --config conf/experiment/mlp/res_relu.yaml"
        if "did you mean" in message:  # said by a parser further in
            return ""
        choice = _CHOICE.search(message)
        if choice:
            return nearest(choice[2].strip("'\""), re.findall(r"[\w.-]+", choice[1]))
        unknown = _UNKNOWN.search(message)
        return self._nearest_key(unknown[1]) if unknown else ""

    def _nearest_key(self, unknown: str) -> str:
        keys = {action.dest for action in self._actions if not action.dest.endswith(".help")}
        if "." not in unknown:
            last = {key.rsplit(".", 1)[-1] for key in keys}
            return "" if unknown in last else nearest(unknown, last)
        parts = unknown.split(".")
        for depth in range(len(parts), 1, -1):  # a key may go deeper than those of this parser, into a class's own
            beginning = ".".join(parts[:depth])
            if beginning in keys:
                break
            hint = nearest(beginning, {key for key in keys if key.count(".") == depth - 1})
            if hint:
                return hint
        return ""


def essence(message: str) -> str:
    """Returns the telling part of a parser's message as one line, headed by the key that it is about."""
    keys, told, given = [], [], ""
    for line in map(str.strip, message.splitlines()):
        if value := _GIVEN.match(line):
            given = f". Got value: {value[1]}"
        key = _KEY.match(line)
        if key:
            keys.append(key[1])
            line = line[key.end() :]
        if line and not _HOW.match(line):
            told.append(line.removeprefix("- "))
    text = _TYPE.sub(lambda found: found[1] or "", "; ".join(dict.fromkeys(told)))
    text = text.replace("Expected a ", "expected ")
    return ": ".join(filter(None, (".".join(keys), text + ("" if "Got value" in text else given))))
