#!/bin/bash
# Expected: fastdigest describes `probability(x1, x2)` as the estimated probability that a value lies in the interval from x1 to x2, both
#   included. If all requests took 5 or 10 seconds, the share from 5 to 10 seconds is 1, and a digest of 100 values is exact there.
# Happens: it is 0.51. `cdf(10)` is 0.51 too, and 1 for anything above 10. Each of the numbers 0 to 4, all of them equally frequent, has
#   the probability 0. Half of a value's weight counts as below the value, a rule known from the t-digest in Java (tdunning/t-digest
#   issue 103), which fastdigest's documentation does not name.
# Versions: fastdigest 0.12.0, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install fastdigest==0.12.0
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys
from importlib.metadata import version

from fastdigest import TDigest

print("fastdigest", version("fastdigest"))
seconds = TDigest.from_values([5.0] * 50 + [10.0] * 50)
inside, up_to, above = seconds.probability(5, 10), seconds.cdf(10), seconds.cdf(10.001)
print(f"50 requests of 5 s and 50 of 10 s: from 5 to 10 s {inside:.3f}, up to 10 s {up_to:.3f}, up to 10.001 s {above:.3f}")
sizes = TDigest.from_values([0, 1, 2, 3, 4] * 1000)
each = [sizes.probability(size, size) for size in range(5)]
print("0 to 4, each 1000 times: probability of each", each)
is_so = 0.49 < inside < 0.52 and 0.49 < up_to < 0.52 and above == 1 and each == [0] * 5
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
