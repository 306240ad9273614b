"""Runs the `kvoffload` command as `python -m kvoffload`, for use when the script is not on the path."""

import sys

from kvoffload.cli.main import main

sys.exit(main())
