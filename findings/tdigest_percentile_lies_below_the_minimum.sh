#!/bin/bash
# Expected: a percentile of a t-digest lies between the least and the greatest of the numbers, and does not fall when p rises.
#   If 90 of 100 loads took 1 ms and ten took 500 ms, each of p1, p10 and p50 is 1 ms.
# Happens: below the middle of the first centroid, tdigest extrapolates the line from the first to the second one to the left. So p0 is 1 ms,
#   p1 is about -440 ms, and p50 is 51 ms. A cache's times, most of them equal, make such large first centroids. Known and closed:
#   CamDavidsonPilon/tdigest issues 16 and 32.
# Versions: tdigest 0.5.2.2, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install tdigest==0.5.2.2
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys
from importlib.metadata import version

from tdigest import TDigest

print("tdigest", version("tdigest"))
digest = TDigest()
digest.batch_update([1] * 90 + [500] * 10)
seen = {p: digest.percentile(p) for p in (0, 1, 10, 50, 99)}
print("90 times 1 and 10 times 500:", ", ".join(f"p{p} is {value:.0f}" for p, value in seen.items()))
is_so = seen[0] == 1 and seen[1] < -100 and seen[10] < -100 and seen[99] <= 500
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
