#!/bin/bash
# Expected: `hit(limit, name, cost=...)` of limits "consumes" the limit and returns whether the cost "could be deducted from the rate limit
#   without exceeding it". What is refused is not deducted, so that of 10,000 tokens a minute a prompt of 4000 gets through after one of
#   6000 was taken and another one of 6000 refused. The moving window and the sliding window counter do so.
# Happens: with the fixed window, the first of the strategies, the refused cost is deducted as well. After the refused prompt nothing is
#   left: the one of 4000 tokens is refused, and so is one of a single token, to the end of the window. A prompt longer than the limit locks
#   its user out at once.
# Versions: limits 5.8.0 with its storage in memory, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install limits==5.8.0
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys
import time
from importlib.metadata import version
from unittest import mock

from limits import parse, storage, strategies

LIMIT = parse("10000/minute")
print("limits", version("limits"))
seen = {}
now = 60 * (time.time() // 60) + 1  # the first second of a minute
with mock.patch("time.time", lambda: now):
    for name in ("FixedWindowRateLimiter", "MovingWindowRateLimiter", "SlidingWindowCounterRateLimiter"):
        limiter = getattr(strategies, name)(storage.MemoryStorage())
        taken = [limiter.hit(LIMIT, "one", cost=tokens) for tokens in (6000, 6000, 4000)]
        longest = [limiter.hit(LIMIT, "other", cost=tokens) for tokens in (20_000, 1)]
        seen[name] = taken, longest
        print(f"{name}: 6000, 6000 and 4000 tokens are let through: {taken}; 20000 and 1 of another user: {longest}")
others = [True, False, True], [False, True]
is_so = list(seen.values()) == [([True, False, False], [False, False]), others, others]
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
