"""`make screenshot`: takes pictures of the dashboards in a browser, with the data of real runs."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from dashboards.generate.boards import BOARDS
from dashboards.observe.prometheus import ObserveError
from dashboards.pictures.boards import SERVE_S, shown, take_boards, take_vllm_boards
from kvoffload.checks.options import seconds
from kvoffload.cli import signals
from kvoffload.cli.exits import Exit

FOLDER = Path(__file__).parent
SHOWN = ("overview",)
TAKEN = FOLDER / "taken.json"
"""The file with a digest for each dashboard in the documents. The digest covers what the picture shows."""
NAMES = tuple(board.name for board in BOARDS)
BROWSER = "chromium-headless-shell"


def main() -> int:
    """Take pictures of the named dashboards during a demo; by default, the documents' pictures during vLLM runs."""
    parser = argparse.ArgumentParser(description="take pictures of dashboards")
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(NAMES)}, of a short demo")
    words = "how long the vLLM engines of the documents' pictures serve (default: %(default)s)"
    parser.add_argument("--seconds", metavar="N", type=seconds, default=SERVE_S, help=words)
    args = parser.parse_args()
    if unknown := set(args.names) - set(NAMES):
        parser.error(f"no picture is named {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    browser = shutil.which(BROWSER)
    if browser is None:
        print(f"needs {BROWSER}: `make tools` installs it", file=sys.stderr)
        return 2
    signals.handle()  # SIGTERM, too, is an exception, so that `with` blocks end their children
    try:
        if args.names:
            taken = take_boards(args.names, FOLDER, browser)
        else:
            taken = take_vllm_boards(SHOWN, FOLDER, browser, args.seconds)
            TAKEN.write_text(json.dumps({name: shown(name) for name in SHOWN}, indent=2) + "\n")
    except ObserveError as error:
        print(f"pictures: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # all children have ended
        return signals.exit_code() or Exit.INTERRUPTED
    for path in taken:
        print(f"{path.name}: {path.stat().st_size:,} bytes", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
