#!/bin/bash
# Expected: `std.round` of Jsonnet gives the nearest integer, and one program gives the same manifests and dashboards with Jsonnet's two
#   implementations, in C++ and in Go, of the same version.
# Happens: with the one in C++, -2.5 becomes -2, and -1.5 becomes -1; with the one in Go they are -3 and -2. 2.5 is 3 with both. In C++ it
#   is the integer below x + 0.5, so that 0.49999999999999994, which is nearer to 0, becomes 1.
# Versions: jsonnet 0.22.0, gojsonnet 0.22.0, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install jsonnet==0.22.0 gojsonnet==0.22.0
cd "$folder"
venv/bin/python - <<'PYTHON'
import json
import sys
from fractions import Fraction
from importlib.metadata import version

import _gojsonnet
import _jsonnet

print("jsonnet", version("jsonnet"), "gojsonnet", version("gojsonnet"))
numbers = [2.5, -1.5, -2.5, -2.6, 0.49999999999999994]
cpp, go = (json.loads(module.evaluate_snippet("example", f"[std.round(n) for n in {numbers}]")) for module in (_jsonnet, _gojsonnet))
for number, *rounded in zip(numbers, cpp, go, strict=True):
    nearest = abs(Fraction(number) - round(Fraction(number)))
    print(f"{number}: C++ {rounded[0]}, Go {rounded[1]}", [abs(Fraction(number) - each) == nearest for each in rounded])
is_so = cpp == [3, -1, -2, -3, 1] and go == [3, -2, -3, -3, 0]
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
