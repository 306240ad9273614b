"""Runs the `kvoffload` command as `python -m kvoffload`, for when its script is not on the path."""

import sys

from kvoffload.cli.main import main

sys.exit(main())
