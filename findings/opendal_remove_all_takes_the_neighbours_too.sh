#!/bin/bash
# Expected: OpenDAL's `remove_all(path)` removes all files and directories at that path. `remove_all("run-1")` removes what is in run-1/
#   and leaves run-10/ alone, and it does the same in every service.
# Happens: the `fs` service does so. The `memory` service takes the path as the beginning of keys and removes run-10/ and
#   "run-1.log" as well. With a slash behind the path both remove the same. Known: apache/iceberg-rust issue 1118, of the S3
#   service, where it is called intended. The Python documentation does not say so.
# Versions: opendal 0.47.12, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install opendal==0.47.12
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys
from importlib.metadata import version

from opendal import Operator

KEYS = ["run-1/block", "run-10/block", "run-1.log", "run-2/block"]


def left(service, path, **options):
    """Return the keys that are left after remove_all."""
    operator = Operator(service, **options)
    for key in KEYS:
        operator.write(key, b"data")
    operator.remove_all(path)
    return [key for key in KEYS if operator.exists(key)]


print("opendal", version("opendal"))
seen = {}
for path in ("run-1", "run-1/"):
    seen[path] = left("fs", path, root="store"), left("memory", path)
    print(f"remove_all({path!r}) leaves in fs {seen[path][0]}, in memory {seen[path][1]}")
is_so = seen == {"run-1": (KEYS[1:], ["run-2/block"]), "run-1/": (KEYS[1:], KEYS[1:])}
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
