"""Vega-Lite's own code, for browsers and for PNG, from the optional package vl-convert."""

from __future__ import annotations

from typing import Any

from geocont.errors import UserError

VERSION = "6.1"  # of Vega-Lite, among those that vl-convert holds


def javascript() -> str:
    """Returns Vega, Vega-Lite and vega-embed as one script; it holds no ``</script``.

    Raises:
        UserError: vl-convert is not installed.
    """
    return _vl_convert().javascript_bundle(vl_version=VERSION).replace("</script", "<\\/script")


def png(spec: dict[str, Any], config: dict[str, Any], scale: float = 2.0) -> bytes:
    """Draws a specification.

    Raises:
        UserError: vl-convert is not installed.
    """
    return _vl_convert().vegalite_to_png(spec, vl_version=VERSION, config=config, scale=scale)


def _vl_convert() -> Any:
    try:
        import vl_convert
    except ImportError as error:
        raise UserError(
            "reports need the optional package vl-convert-python; pip install 'geocont[report]' brings it"
        ) from error
    return vl_convert
