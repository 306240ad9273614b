#!/bin/bash
# Expected: `CuckooFilter.init_error_rate(0.01, capacity=1000)` of pyprobables makes a filter that says "there" for about 1% of the keys that
#   were never added, as its name says and as its `error_rate` (0.01) reports, and as the BloomFilter of the same package does.
# Happens: with a thousand keys in it, it says "there" for about 70% of all other keys. A key's two buckets follow from its fingerprint, which
#   has ten bits, so that any key with the fingerprint of a stored one is found, wherever it would belong. For the same reason keys
#   that were added count as known: `elements_added` is about 730. The default fingerprint, 32 bits, hides it.
# Versions: pyprobables 0.7.0, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install pyprobables==0.7.0
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys
from importlib.metadata import version

from probables import BloomFilter, CuckooFilter

NUMBER, RATE = 1000, 0.01
print("pyprobables", version("pyprobables"))
filters = {
    "BloomFilter": BloomFilter(est_elements=NUMBER, false_positive_rate=RATE),
    "CuckooFilter": CuckooFilter.init_error_rate(RATE, capacity=NUMBER),
    "CuckooFilter, 32 bits": CuckooFilter(capacity=NUMBER),
}
wrong = {}
for name, keys in filters.items():
    for number in range(NUMBER):
        keys.add(f"block-{number}")
    assert all(keys.check(f"block-{number}") for number in range(NUMBER))
    wrong[name] = sum(keys.check(f"other-{number}") for number in range(10 * NUMBER)) / (10 * NUMBER)
    print(f"{name}: {keys.elements_added} of {NUMBER} added, {wrong[name]:.1%} of other keys are found")
cuckoo = filters["CuckooFilter"]
print("reported: error rate", cuckoo.error_rate, "with a fingerprint of", cuckoo.fingerprint_size_bits, "bits")
is_so = wrong["BloomFilter"] < 0.02 and wrong["CuckooFilter"] > 0.5 and wrong["CuckooFilter, 32 bits"] < 0.001
is_so &= cuckoo.error_rate == RATE and cuckoo.elements_added < 0.8 * NUMBER
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
