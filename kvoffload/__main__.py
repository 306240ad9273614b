"""`python -m kvoffload`: the command where its script is not on the path."""

import sys

from kvoffload.cli.main import main

sys.exit(main())
