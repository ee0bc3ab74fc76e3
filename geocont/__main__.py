"""``python -m geocont`` is the ``geocont`` command."""

import sys

from geocont.cli import main

sys.exit(main())
