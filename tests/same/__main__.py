"""`make same`: compares the code's behaviour with the files in tests/same/golden."""

from __future__ import annotations

import argparse
import difflib
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.same import parts

GOLDEN = Path(__file__).parent / "golden"
STATES = (250, 2000)
"""The exploration stops at each of these numbers of states. Each number has a golden file."""


def main() -> int:
    """Print the differences from the golden files; return 1 if any. With --write, replace the files."""
    options = _options()
    tables: dict[str, Callable[[], parts.Rows]] = {
        "hooks": parts.hooks,
        "trace": parts.trace,
        "simulated": parts.simulated,
        f"explored_{options.states}": partial(parts.explored, options.states),
    }
    is_different = False
    for name, table in tables.items():
        began = time.monotonic()
        found = _text(table())
        if options.write:
            (GOLDEN / f"{name}.txt").write_text(found, encoding="utf-8")
        differences = _differences(name, found)
        is_different |= bool(differences)
        print("".join(f"{line}\n" for line in differences), end="")
        verdict = f"{len(differences)} lines of differences" if differences else "same"
        print(f"{name}: {verdict} ({time.monotonic() - began:.0f} s)", flush=True)
    return int(is_different)


def _text(rows: parts.Rows) -> str:
    width = max(map(len, rows))
    return "".join(f"{name:{width}}  {value}\n" for name, value in rows.items())


def _differences(name: str, found: str) -> list[str]:
    golden = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
    lines = golden.splitlines(), found.splitlines()
    return list(difflib.unified_diff(*lines, f"golden/{name}", f"now/{name}", lineterm="", n=0))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make same", description=__doc__)
    parser.add_argument("--write", action="store_true", help="replace the golden files")
    parser.add_argument(
        "--states", type=int, choices=STATES, default=STATES[0], help="states a world (default %(default)s)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
