"""Writes all generated files, or lists the stale files: `python -m dashboards.generate [--check]`."""

from __future__ import annotations

import argparse
import sys

from dashboards.generate.boards import BOARDS
from dashboards.generate.files import FILES
from dashboards.generate.grafana import check_colours


def main() -> int:
    """Write the stale files. With `--check`, list the stale files, and return 1 if there are any."""
    parser = argparse.ArgumentParser(description="write the dashboards and the runbook")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a file is stale")
    only_check = parser.parse_args().check
    check_colours(BOARDS)
    stale = [(path, make()) for path, make in FILES.items()]
    stale = [(path, text) for path, text in stale if not path.exists() or path.read_text() != text]
    for path, text in stale:
        print(f"{path.name} {'is stale: run `make dashboards`' if only_check else 'written'}")
        if not only_check:
            path.write_text(text)
    return 1 if stale and only_check else 0


if __name__ == "__main__":
    sys.exit(main())
