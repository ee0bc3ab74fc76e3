"""Finding the shipped configuration files: conf/ of the repository, or the copy that a wheel carries."""

from __future__ import annotations

import difflib
from pathlib import Path

from geocont.errors import UserError

_PACKAGE = Path(__file__).parent


def conf_folder() -> Path:
    """Returns the folder of shipped configurations.

    Raises:
        UserError: The installation has none.
    """
    for folder in (_PACKAGE.parent / "conf", _PACKAGE / "conf"):
        if (folder / "base.yaml").is_file():
            return folder
    raise UserError(f"no conf/ folder beside or in {_PACKAGE}; install geocont from its repository or its wheel")


def find_config(given: str) -> Path:
    """Returns the configuration file that a ``--config`` option names.

    A path that is not there but starts with ``conf/`` is looked up among the shipped files, so that the commands of the
    documentation work from any folder.

    Raises:
        UserError: There is no such file; the message names the nearest one.
    """
    path = Path(given).expanduser()
    if path.is_file():
        return path
    shipped = conf_folder()
    if path.parts[:1] == ("conf",) and (shipped / Path(*path.parts[1:])).is_file():
        return shipped / Path(*path.parts[1:])
    names = [f"conf/{file.relative_to(shipped)}" for file in sorted(shipped.rglob("*.yaml"))]
    near = difflib.get_close_matches(given, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"shipped files are in {shipped}"
    raise UserError(f"--config: {given} is not a file here or among the shipped ones; {hint}")
