"""The parser behind ``geocont fit``: errors are one line that names the key, the value and the nearest valid one."""

from __future__ import annotations

import re
from typing import Any, NoReturn

from lightning.pytorch.cli import LightningArgumentParser

from geocont.cli.options import nearest
from geocont.errors import UserError

#: Lines of a jsonargparse message that say how it tried, not what is wrong.
_HOW = re.compile(r"Does not validate|Subtypes:|Errors:|Given value type|Expected a (path but|<class 'NoneType'>)")
_KEY = re.compile(r"Parser key ['\"]([^'\"]+)['\"]:\s*")
_GIVEN = re.compile(r"Given value: (?:NestedArg\(key='(?P<key>[^']+)', val=.*\)|(?P<value>.*))")
_EXPECTED = re.compile(r"Expected an? (?P<type>.+?)(?:\. Got value: (?P<value>.*))?$")
_LITERAL = re.compile(r"(?:typing\.)?Literal\[(.*)\]")
_CLASS = re.compile(r"<class '(?:\w+\.)*(\w+)'>")
_UNKNOWN = re.compile(
    r"unrecognized arguments: -*(?P<argument>[\w.]+)|Option ['\"](?P<option>[\w.]+)['\"] is not accepted"
    r"|(?:Group ['\"](?P<group>[\w.]+)['\"]|Subcommand \S+) does not accept option ['\"](?P<entry>[\w.]+)"
)
_NAMED = re.compile(r"([a-z_][\w.]*)(: | is not an option)")  # how an inner parser's message begins


class GeoContParser(LightningArgumentParser):
    """LightningArgumentParser that raises :class:`UserError` instead of printing usage, and takes no abbreviations."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.allow_abbrev = False  # an abbreviation is a misspelling that happens to be unique today

    def parse_args(self, args: Any = None, *more: Any, **options: Any) -> Any:
        """Parses arguments. jsonargparse hands ``--model.x=null`` on to the class's own parser as ``--x=None``."""
        if isinstance(args, list) and len(args) == 1 and args[0].endswith("=None"):
            args = [args[0].removesuffix("None") + "null"]
        return super().parse_args(args, *more, **options)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raises the message, with the nearest valid key or value, as a :class:`UserError`."""
        raise UserError(essence(message) + self._hint(message)) from ex

    def _hint(self, message: str) -> str:
        if re.search(r"arguments are required: \w+\.model$", message):
            return "; an experiment has one, for example --config conf/experiment/mlp/res_relu.yaml"
        if "did you mean" in message:  # said by a parser further in
            return ""
        if re.match(r"Parser key .callbacks\.\w+.:", message) and "dot import path string" in message:
            return "; its options are given one by one, and null turns it off"
        choices = [choice for found in _LITERAL.finditer(message) for choice in re.findall(r"[\w.-]+", found[1])]
        value = re.search(r"(?:Got|Given) value: (.+)$", message)
        if choices and value:
            return nearest(value[1].strip("'\""), choices)
        unknown = _unknown(message)
        return self._nearest_key(unknown) if unknown else ""

    def _nearest_key(self, unknown: str) -> str:
        keys = set(self._keys())
        if "." not in unknown:
            last = {key.rsplit(".", 1)[-1] for key in keys}
            return "" if unknown in last else nearest(unknown, last)
        parts = unknown.split(".")
        for depth in range(len(parts), 0, -1):  # a key may go deeper than those of this parser, into a class's own
            beginning = ".".join(parts[:depth])
            known = {".".join(key.split(".")[:depth]) for key in keys if key.count(".") >= depth - 1}
            if beginning in known:
                break
            hint = nearest(beginning, known)
            if hint:
                return hint
        return ""

    def _keys(self) -> list[str]:
        """Returns the keys of this parser and of its commands'."""
        commands = self._subcommands_action
        parsers = [self, *(commands._name_parser_map.values() if commands else ())]
        return [action.dest for each in parsers for action in each._actions if not action.dest.endswith(".help")]


def essence(message: str) -> str:
    """Returns the telling part of a parser's message as one line, headed by the key that it is about."""
    key, nested, value = "", None, None
    told: list[str] = []
    types: list[str] = []
    for line in (line.strip().removeprefix("- ") for line in message.splitlines()):
        if found := _KEY.match(line):
            key, line = found[1], line[found.end() :]
        if _HOW.match(line) or not line:
            continue
        if found := _GIVEN.match(line):
            nested, value = found["key"], found["value"] or value
        elif found := _EXPECTED.match(line):
            kind, _, text = found["type"].partition(": ")
            types.append(kind)
            value = found["value"] or value or text or None
        elif told and told[-1].endswith(":"):
            told[-1] += f" {line}"
        elif (text := _plain(line)) not in told:
            told.append(text)
    if not told and types:
        told = [f"expected {_either(types)}" + ("" if value is None else f". Got value: {value}")]
    return _headed(key, nested, "; ".join(told))


def _headed(key: str, nested: str | None, text: str) -> str:
    """Puts the whole key before a text, which may begin with the end of it."""
    inner = _NAMED.match(text)
    if not key:
        return text
    if inner is None:
        return f"{key}.{nested}: {text}" if nested else f"{key}: {text}"
    name = nested if nested and nested.endswith(inner[1]) else inner[1]
    return f"{key}.{name}{text[inner.end(1) :]}"


def _plain(line: str) -> str:
    """Returns a line of jsonargparse's in the words of a person."""
    unknown = _unknown(line)
    if unknown:
        return f"{unknown} is not an option"
    line = re.sub(r"Unable to load config ['\"](.*)['\"].*", r"expected named entries. Got value: \1", line)
    return line.replace("Problem with given class_path ", "class_path ")


def _unknown(message: str) -> str | None:
    """Returns the option that a message does not know."""
    found = _UNKNOWN.search(message)
    if found is None:
        return None
    parts = (found["group"], found["argument"] or found["option"] or found["entry"])
    return ".".join(filter(None, parts))


def _either(types: list[str]) -> str:
    """Returns ``int or one of 'a', 'b'``; a class is what is left where nothing simpler would do."""
    simple = [each for each in types if each != "dot import path string"]
    choices = ", ".join(found[1] for each in simple if (found := _LITERAL.fullmatch(each)))
    names = [_CLASS.sub(r"\1", each).replace("typing.", "") for each in simple if not _LITERAL.fullmatch(each)]
    shown = [*names, *([f"one of {choices}"] if choices else [])]
    return " or ".join(dict.fromkeys(shown)) or "a class, as package.module.Class"
