#!/bin/bash
# Expected: pyarrow.json reads a column of whole numbers as whole numbers, or says that one of them is too large for int64.
#   Traces of LLM servers and KV cache events have such columns: lists of 64-bit hashes of KV blocks, often unsigned.
# Happens: one hash of 2^63 or more turns all hashes of the file into doubles, without a warning. Doubles have 53 bits, so
#   different hashes become equal, and prompts seem to share a prefix that they do not share.
# Versions: pyarrow 26.0.1, Python 3.11. An explicit schema with uint64 reads the same file right.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install pyarrow==26.0.1
cd "$folder"
venv/bin/python - <<'PYTHON'
import json
import sys
from pathlib import Path

import pyarrow as pa
from pyarrow import json as arrow_json

FIRST, SECOND, LARGE = 2**62 + 1, 2**62 + 2, 2**63 + 1


def write(*hashes):
    rows = [{"input_length": 16, "hash_ids": [each]} for each in hashes]
    Path("trace.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def read(schema=None):
    options = arrow_json.ParseOptions(explicit_schema=schema)
    column = arrow_json.read_json("trace.jsonl", parse_options=options)["hash_ids"]
    return column.type.value_type, [hashes[0] for hashes in column.to_pylist()]


print("pyarrow", pa.__version__)
write(FIRST, SECOND)
kind, small = read()
print(f"two hashes below 2^63: {kind}, different: {small[0] != small[1]}")
write(FIRST, SECOND, LARGE)
kind, large = read()
print(f"the same, and one above 2^63: {kind}, different: {large[0] != large[1]}")
_, right = read(pa.schema([("hash_ids", pa.list_(pa.uint64()))]))
print(f"with a schema: different: {right[0] != right[1]}")
is_so = small == [FIRST, SECOND] and large[0] == large[1] and right == [FIRST, SECOND, LARGE]
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
