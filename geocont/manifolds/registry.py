"""Manifolds by name, as configurations and parameter groups give them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from geocont.errors import UserError
from geocont.manifolds.base import Manifold
from geocont.manifolds.dgram import DGram
from geocont.manifolds.euclidean import Euclidean
from geocont.manifolds.oblique import Oblique
from geocont.manifolds.stiefel import Stiefel

MANIFOLDS: dict[str, type[Manifold]] = {kind.name: kind for kind in (Euclidean, Stiefel, DGram, Oblique)}


def as_manifold(given: str | Mapping[str, Any] | Manifold) -> Manifold:
    """Returns a manifold from its name, or from its name and options as ``{name: dgram, lo: 0.5, hi: 2.0}``.

    Raises:
        UserError: There is no such manifold or option.
    """
    if isinstance(given, Manifold):
        return given
    options = dict(given) if isinstance(given, Mapping) else {"name": given}
    name = options.pop("name", None)
    if not isinstance(name, str) or name not in MANIFOLDS:
        near = difflib.get_close_matches(str(name), MANIFOLDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"manifold must be one of {', '.join(MANIFOLDS)}, got {name!r}{hint}")
    try:
        return MANIFOLDS[name](**options)
    except TypeError as error:
        raise UserError(f"manifold {name}: it has no options {', '.join(options)}") from error
