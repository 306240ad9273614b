#!/bin/bash
# Expected: a filter of a Vortex file compares floats as pyarrow, numpy and Python do: -0.0 is equal to 0.0 and not below it, and a NaN is neither
#   above nor below a number, so that no comparison finds it.
# Happens: floats are ordered as their bits are. `column >= 0.0` leaves out -0.0, and `column == 0.0` too. `column > 0.0` finds each NaN without
#   a sign, and `column < 0.0` each with one, which is what x86 makes of 0.0 / 0.0. Known and on purpose: vortex-data/vortex pull request 808.
#   Issue 3958 there was about NaN and statistics.
# Versions: vortex-data 0.93.0, pyarrow 26.0.1, numpy 2.4.6, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install vortex-data==0.93.0 pyarrow==26.0.1 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PYTHON'
import operator
import sys
from importlib.metadata import version

import numpy as np
import pyarrow as pa
import pyarrow.compute
import vortex
import vortex.expr

NUMBERS = np.array([-1.0, -0.0, 0.0, 1.0, np.nan, -np.nan])
NAMES = ["-1", "-0", "0", "1", "NaN", "-NaN"]

print("vortex-data", version("vortex-data"), "pyarrow", version("pyarrow"))
table = pa.table({"number": NUMBERS, "name": NAMES})
vortex.io.write(table, "numbers.vortex")
seen = {}
for name in ("gt", "ge", "lt", "eq"):
    compare = getattr(operator, name)
    found = vortex.open("numbers.vortex").to_arrow(expr=compare(vortex.expr.column("number"), 0.0)).read_all()
    others = table.filter(compare(pyarrow.compute.field("number"), 0.0))
    seen[name] = found["name"].to_pylist(), others["name"].to_pylist()
    print(f"{name} 0.0: vortex finds {seen[name][0]}, pyarrow {seen[name][1]}")
is_so = seen == {
    "gt": (["1", "NaN"], ["1"]),
    "ge": (["0", "1", "NaN"], ["-0", "0", "1"]),
    "lt": (["-1", "-0", "-NaN"], ["-1"]),
    "eq": (["0"], ["-0", "0"]),
}
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
