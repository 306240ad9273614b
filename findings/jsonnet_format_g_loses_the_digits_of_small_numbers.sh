#!/bin/bash
# Expected: "%g" in Jsonnet follows "the same rules as Python", by the documentation of the standard library: six significant digits, or as
#   many as "%.3g" asks for. 0.000123456 is "0.000123456", and "0.000123" with "%.3g".
# Happens: the digits are counted from the point, and zeros count: "%g" gives "0.00012", and "%.3g" gives "0". From 0.0001 to 1 each zero
#   after the point takes one digit from the number. So a limit in seconds that a dashboard or a rule has from "%.3g" is 0. The
#   implementations in C++, Go and Rust do the same. Other faults of "%g" are known: google/jsonnet issue 1327, google/go-jsonnet issue 890.
# Versions: jsonnet 0.22.0, gojsonnet 0.22.0, rjsonnet 0.5.6, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install jsonnet==0.22.0 gojsonnet==0.22.0 rjsonnet==0.5.6
cd "$folder"
venv/bin/python - <<'PYTHON'
import json
import sys
from importlib.metadata import version

import _gojsonnet
import _jsonnet
import rjsonnet

print("jsonnet", version("jsonnet"))
wrong = {}
for form, number in (("%g", 12.3456), ("%g", 0.00123456), ("%g", 0.000123456), ("%g", 0.0000123456), ("%.3g", 1.23456), ("%.3g", 0.000123456)):
    program = f"{json.dumps(form)} % {number!r}"
    texts = {json.loads(module.evaluate_snippet("example", program)) for module in (_jsonnet, _gojsonnet, rjsonnet)}
    print(f"{program}: {' and '.join(sorted(texts))}, in Python {form % number}")
    if texts != {form % number}:
        wrong[form, number] = texts
is_so = wrong == {("%g", 0.00123456): {"0.00123"}, ("%g", 0.000123456): {"0.00012"}, ("%.3g", 0.000123456): {"0"}}
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
