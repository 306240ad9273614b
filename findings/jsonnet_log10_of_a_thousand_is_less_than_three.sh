#!/bin/bash
# Expected: `std.log10(1000)` in Jsonnet is 3, and `std.log2` of a power of two is the power, as in Python, C and JavaScript, whose
#   functions of these names are exact there. So `std.floor(std.log10(n)) + 1` is a number's count of digits, and
#   `std.pow(2, std.floor(std.log2(n)))` the greatest power of two in it.
# Happens: both divide two natural logarithms: `std.log10(1000)` is 2.9999999999999996, and rounded down it is 2. Six of the powers of ten
#   to 10^15 are wrong, and eight of those of two to 2^60. The implementations in C++ and Go have the same numbers.
# Versions: jsonnet 0.22.0, gojsonnet 0.22.0, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install jsonnet==0.22.0 gojsonnet==0.22.0
cd "$folder"
venv/bin/python - <<'PYTHON'
import json
import math
import sys
from importlib.metadata import version

import _gojsonnet
import _jsonnet

print("jsonnet", version("jsonnet"))
wrong = []
for module in (_jsonnet, _gojsonnet):
    for base, most in ((10, 15), (2, 60)):
        numbers = [base**power for power in range(most + 1)]
        assert [getattr(math, f"log{base}")(number) for number in numbers] == list(range(most + 1))
        logs = json.loads(module.evaluate_snippet("example", f"[std.log{base}(n) for n in {numbers}]"))
        wrong.append({power: log for power, log in enumerate(logs) if log != power})
        print(f"{module.__name__}: of {base}^0 to {base}^{most} these are wrong: {wrong[-1]}")
floors = [json.loads(module.evaluate_snippet("example", "std.floor(std.log10(1000))")) for module in (_jsonnet, _gojsonnet)]
is_so = floors == [2, 2] and all(wrong)
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
