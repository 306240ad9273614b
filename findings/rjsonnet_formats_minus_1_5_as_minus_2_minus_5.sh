#!/bin/bash
# Expected: Jsonnet's `%` and `std.format` follow "the same rules as Python", by the documentation of the standard library. "%.1f" % -1.5 is
#   "-1.5", with all implementations of the language.
# Happens: rjsonnet (jrsonnet, in Rust) rounds a negative number down and writes the rest with a sign of its own: "-2.-5", which is no
#   number, and -1e-7 with "%f" is "-1.000000", which is one. "%d" of -5.5 is -6, and of -0.5 it is -1. Thresholds and offsets in a
#   dashboard that Jsonnet made are other ones, and queries have faults. Positive numbers are right, and so is "%s".
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
for form, number in (("%.1f", 1.5), ("%.1f", -1.5), ("%f", -1e-7), ("%.2f", -0.5), ("%d", 5.5), ("%d", -5.5), ("%s", -1.5)):
    program = f"{json.dumps(form)} % {number!r}"
    texts = {name: json.loads(module.evaluate_snippet("example", program)) for name, module in IMPLEMENTATIONS.items()}
    print(f"{program}: Python {form % number}", *(f"{name} {text}" for name, text in texts.items()), sep=", ")
    wrong.update({(name, form, number): text for name, text in texts.items() if text != form % number})
is_so = wrong == {
    ("rjsonnet", "%.1f", -1.5): "-2.-5",
    ("rjsonnet", "%f", -1e-7): "-1.000000",
    ("rjsonnet", "%.2f", -0.5): "-1.-50",
    ("rjsonnet", "%d", -5.5): "-6",
}
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
