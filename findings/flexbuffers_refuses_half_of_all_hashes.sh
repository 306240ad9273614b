#!/bin/bash
# Expected: `flexbuffers.Dumps` of Python's flatbuffers packs an int of 64 bits. FlexBuffers have signed and unsigned ones, and the builder
#   writes an unsigned one with `UInt`. A hash of a KV block, as vLLM's events and xxhash have it, is unsigned.
# Happens: an int of 2^63 or more, half of all such hashes, is a ValueError ("value is too big to encode"): each int is taken for a signed
#   one. In the message it is twice the number. `UInt` and `Loads` work with the same number.
# Versions: flatbuffers 25.12.19, xxhash 4.1.0, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install flatbuffers==25.12.19 xxhash==4.1.0
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys
from importlib.metadata import version

import xxhash
from flatbuffers import flexbuffers


def unsigned(number):
    builder = flexbuffers.Builder()
    builder.UInt(number)
    return flexbuffers.Loads(bytes(builder.Finish()))


print("flatbuffers", version("flatbuffers"))
hashes = [xxhash.xxh64_intdigest(f"block {number}".encode()) for number in range(1000)]
refused = []
for number in hashes:
    try:
        assert flexbuffers.Loads(bytes(flexbuffers.Dumps(number))) == number
    except ValueError as error:
        refused.append(number)
        message = str(error)
print(f"{len(refused)} of {len(hashes)} hashes are refused, the last one, {refused[-1]}, with: {message}")
is_so = refused == [number for number in hashes if number >= 2**63] and str(2 * refused[-1]) in message
is_so = is_so and all(unsigned(number) == number for number in hashes)
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
