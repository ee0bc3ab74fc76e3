"""The arrows of the house: imports point down only."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

#: Room -> the rooms it may import from, beside itself and the ground (errors, weights, conf).
ALLOWED = {
    "geocont.__main__": {"geocont.cli"},
    "geocont.cli": {
        "geocont.experiments",
        "geocont.pretrained",
        "geocont.bench",
        "geocont.report",
        "geocont.runs",
        "callbacks",
    },
    "geocont.experiments": {"callbacks", "geocont.modules", "geocont.measures", "geocont.report", "geocont.runs"},
    "geocont.bench": {
        "geocont.runs",
        "callbacks",
        "geocont.modules",
        "geocont.models",
        "geocont.data",
        "geocont.optim",
        "geocont.linalg",
        "geocont.manifolds",
        "geocont.pretrained",
    },
    "callbacks": {"geocont.measures", "geocont.linalg", "geocont.report"},
    "geocont.pretrained": {"geocont.measures", "geocont.linalg", "geocont.report", "geocont.runs"},
    "geocont.modules": {"geocont.models", "geocont.optim", "geocont.data"},
    "geocont.report": {"geocont.runs", "geocont.measures"},
    "geocont.measures": {"geocont.linalg"},
    "geocont.optim": {"geocont.manifolds", "geocont.linalg"},
    "geocont.manifolds": {"geocont.linalg"},
    "geocont.models": set(),
    "geocont.data": set(),
    "geocont.runs": set(),
    "geocont.linalg": set(),
}
GROUND = {"geocont", "geocont.errors", "geocont.weights", "geocont.conf"}


def room(module: str) -> str:
    parts = module.split(".")
    return "callbacks" if parts[0] == "callbacks" else ".".join(parts[:2])


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
    return {name for name in found if name.split(".")[0] in ("geocont", "callbacks")}


FILES = sorted([*ROOT.glob("geocont/**/*.py"), *ROOT.glob("callbacks/**/*.py")])


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    here = room(module)
    for imported in map(room, imports(path)):
        if imported in GROUND or imported == here:
            continue
        assert here in ALLOWED, f"{module} lies on the ground and may import nothing, but imports {imported}"
        assert imported in ALLOWED[here], f"{module} imports {imported}, which does not lie below it"
