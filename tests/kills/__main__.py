"""`make deep`: kills every command at random moments, and prints all problems.

python -m tests.kills --each 40 [--seed N]
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

from kvoffload.checks.options import positive
from tests.kills.killing import COMMANDS, Killer, draw


def main() -> int:
    parser = argparse.ArgumentParser(description="kill every command at random moments")
    parser.add_argument("--each", metavar="N", type=positive, default=40, help="kills of each command")
    parser.add_argument("--seed", metavar="N", type=int, default=random.SystemRandom().randrange(10**6))
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        killer = Killer(Path(folder))
        problems = list(killer.problems(draw(args.seed, args.each * len(COMMANDS))))
    for problem in problems:
        print(problem)
    print(
        f"{args.each * len(COMMANDS)} kills, {killer.hits} of them while the process ran: {len(problems)} problems"
    )
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
