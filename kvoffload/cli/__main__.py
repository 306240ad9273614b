"""`python -m kvoffload.cli`: as `python -m kvoffload`."""

import sys

from kvoffload.cli.main import script

sys.exit(script())
