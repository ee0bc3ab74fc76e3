"""Sphinx: the documentation, with its reference made from docstrings and from the commands' own help."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import Directive

project = "geocont"
author = "the geocont developers"
project_copyright = "the geocont developers; Apache 2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "geocont"
html_static_path: list[str] = []
suppress_warnings = ["misc.highlighting_failure"]  # shell sessions with placeholders
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signature has them
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_use_ivar = True


class CommandHelp(Directive):
    """``.. command-help:: fit`` shows what ``geocont fit --help`` prints."""

    required_arguments = 1
    final_argument_whitespace = True
    option_spec: ClassVar[dict[str, Any]] = {}

    def run(self) -> list[nodes.Node]:
        """Runs the command; one that fails is an error of the build."""
        words = [*self.arguments[0].split(), "--help"]
        environment = os.environ | {"COLUMNS": "110", "NO_COLOR": "1"}
        command = [sys.executable, "-m", "geocont", *words]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            raise self.error(f"geocont {' '.join(words)} ended with {done.returncode}: {done.stderr}")
        return [nodes.literal_block(done.stdout, done.stdout, language="text")]


def setup(app: Any) -> dict[str, bool]:
    """Registers the directive."""
    app.add_directive("command-help", CommandHelp)
    return {"parallel_read_safe": True}
