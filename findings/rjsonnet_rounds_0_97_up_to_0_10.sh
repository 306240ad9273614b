#!/bin/bash
# Expected: Jsonnet's `%` and `std.format` follow "the same rules as Python", by the documentation of the standard library. "%.1f" % 0.97 is
#   "1.0".
# Happens: rjsonnet (jrsonnet, in Rust) does not carry what is rounded up into the part before the point: 0.97 becomes "0.10", 1.96 becomes
#   "1.10" and 99.97 becomes "99.10". So a threshold of 97% in a dashboard is written as 10%. The same with two digits: 0.996 becomes
#   "0.100". The implementation in C++ had the fault, until google/jsonnet issue 879.
# Versions: rjsonnet 0.5.6, jsonnet 0.22.0, gojsonnet 0.22.0, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install rjsonnet==0.5.6 jsonnet==0.22.0 gojsonnet==0.22.0
cd "$folder"
venv/bin/python - <<'PYTHON'
import json
import sys
from importlib.metadata import version

import _gojsonnet
import _jsonnet
import rjsonnet

IMPLEMENTATIONS = {"jsonnet": _jsonnet, "gojsonnet": _gojsonnet, "rjsonnet": rjsonnet}
print("rjsonnet", version("rjsonnet"))
wrong = {}
for form, number in (("%.1f", 0.94), ("%.1f", 0.97), ("%.1f", 1.96), ("%.1f", 99.97), ("%.2f", 0.97), ("%.2f", 0.996)):
    program = f"{json.dumps(form)} % {number!r}"
    texts = {name: json.loads(module.evaluate_snippet("example", program)) for name, module in IMPLEMENTATIONS.items()}
    print(f"{program}: Python {form % number}", *(f"{name} {text}" for name, text in texts.items()), sep=", ")
    wrong.update({(name, form, number): text for name, text in texts.items() if text != form % number})
is_so = wrong == {
    ("rjsonnet", "%.1f", 0.97): "0.10",
    ("rjsonnet", "%.1f", 1.96): "1.10",
    ("rjsonnet", "%.1f", 99.97): "99.10",
    ("rjsonnet", "%.2f", 0.996): "0.100",
}
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
