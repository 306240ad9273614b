"""Runs the `kvoffload` command as `python -m kvoffload`, for environments whose PATH lacks the script."""

import sys

from kvoffload.cli.main import main

sys.exit(main())
