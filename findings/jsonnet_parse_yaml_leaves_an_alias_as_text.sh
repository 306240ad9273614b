#!/bin/bash
# Expected: Jsonnet's `std.parseYaml` reads YAML by "best effort", and what cannot be converted is an error, by its documentation. An alias
#   such as `*limits` stands for what was marked with `&limits`, as manifests and Compose files use it, and `~` is null.
# Happens: the implementation in C++ gives the text "*limits" and drops the mark, gives "~" for null, and "0x10" for 16, without an error.
#   The same version in Go reads them. So the manifests of one program differ between the two. Of the aliases it is known: google/jsonnet
#   issue 1162 and pull request 1165, both open, from the time when an alias ended the whole program.
# Versions: jsonnet 0.22.0, gojsonnet 0.22.0, pyyaml 6.0.3, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install jsonnet==0.22.0 gojsonnet==0.22.0 pyyaml==6.0.3
cd "$folder"
venv/bin/python - <<'PYTHON'
import json
import sys
from importlib.metadata import version

import _gojsonnet
import _jsonnet
import yaml

print("jsonnet", version("jsonnet"), "gojsonnet", version("gojsonnet"))
seen = {}
for text in ("first: &limits {memory: 16Gi}\nsecond: *limits", "[&a x, *a]", "memory: ~", "size: 0x10", "size: 16", "memory: null"):
    program = f"std.parseYaml({json.dumps(text)})"
    cpp, go = (json.loads(module.evaluate_snippet("example", program)) for module in (_jsonnet, _gojsonnet))
    assert go == yaml.safe_load(text)
    seen[text] = cpp
    print(f"{text!r}: C++ {cpp}, Go {go}")
is_so = list(seen.values()) == [
    {"first": {"memory": "16Gi"}, "second": "*limits"}, ["x", "*a"], {"memory": "~"}, {"size": "0x10"}, {"size": 16}, {"memory": None}
]
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
