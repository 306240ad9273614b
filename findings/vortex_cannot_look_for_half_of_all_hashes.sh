#!/bin/bash
# Expected: a column of uint64 in a Vortex file, such as the hashes of KV blocks, can be filtered by any of its values:
#   `vortex.expr.literal(dtype, value)` takes the type of the value.
# Happens: for a value of 2^63 or more, half of all hashes, `literal` raises an OverflowError, "Python int too large to convert to C long", although
#   the type is unsigned. `vortex.scalar` does so too. Such values can be written and read, and the file's other half can be found.
# Versions: vortex-data 0.93.0, pyarrow 26.0.1, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install vortex-data==0.93.0 pyarrow==26.0.1
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys
from importlib.metadata import version

import pyarrow as pa
import vortex
import vortex.expr

HASHES = [7, 2**63 - 1, 2**63, 2**64 - 1]


def found(number):
    try:
        literal = vortex.expr.literal(vortex.uint(64), number)
    except OverflowError as error:
        return str(error)
    return vortex.open("hashes.vortex").to_arrow(expr=vortex.expr.column("hash") == literal).read_all()["hash"].to_pylist()


print("vortex-data", version("vortex-data"))
vortex.io.write(pa.table({"hash": pa.array(HASHES, pa.uint64())}), "hashes.vortex")
read = vortex.open("hashes.vortex").to_arrow().read_all()["hash"].to_pylist()
print("the file has", read)
seen = [found(number) for number in HASHES]
for number, answer in zip(HASHES, seen):
    print(f"{number}: {answer}")
error = "Python int too large to convert to C long"
is_so = read == HASHES and seen == [[7], [2**63 - 1], error, error]
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
