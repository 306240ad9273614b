#!/bin/bash
# Expected: DataSketches' HLL and theta sketches count distinct 64-bit numbers, such as the hashes or ids of KV blocks, and give about
#   the same count for the same numbers. An integer that their `update` cannot take is an error.
# Happens: an integer of 2^63 or more, half of all unsigned hashes, does not fit the integer's overload, and is taken as a float
#   with 53 bits, without an error. So 4000 ids with one high part and a counter below count as 3. The CPC sketch of the same package
#   counts 4000. Negative numbers, the same hashes as signed ones, are right.
# Versions: datasketches 5.2.0, numpy 2.4.6 (which datasketches needs), Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install datasketches==5.2.0 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys
from importlib.metadata import version

from datasketches import cpc_sketch, hll_sketch, update_theta_sketch

NUMBER = 4000
print("datasketches", version("datasketches"))
seen = {}
for first in (100 << 56, 200 << 56):
    for name, sketch in (("HLL", hll_sketch(14)), ("theta", update_theta_sketch()), ("CPC", cpc_sketch(14))):
        for offset in range(NUMBER):
            sketch.update(first + offset)
        seen[name, first] = sketch.get_estimate()
        print(f"{name}: {NUMBER} different numbers from {first:#x} on count as {seen[name, first]:.0f}")
few = [count for (name, first), count in seen.items() if name != "CPC" and first >= 2**63]
right = [count for count in seen.values() if 0.95 * NUMBER < count < 1.05 * NUMBER]
is_so = len(few) == 2 and max(few) < 4 and len(right) == 4
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
