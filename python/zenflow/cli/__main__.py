"""``python -m zenflow.cli`` is the command ``zenflow``."""

import sys

from zenflow.cli import main

sys.exit(main())
