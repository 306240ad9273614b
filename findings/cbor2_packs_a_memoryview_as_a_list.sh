#!/bin/bash
# Expected: a memoryview of bytes is packed as the bytes are: as a byte string. msgpack, msgspec and ormsgpack do so with MessagePack, and
#   cbor2 itself with bytearray. So a block's hash by `sha256(cbor2.dumps(...))`, as vLLM's sha256_cbor makes it, does not depend on
#   whether the bytes came from a buffer.
# Happens: cbor2 takes a memoryview for a sequence, and packs a list of integers. It takes up to twice the space, comes back as a list, and
#   has another hash than the same bytes. cbor2 5.7.1 refused a memoryview with an error.
# Versions: cbor2 6.3.0, msgpack 1.2.4, msgspec 0.22.0, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install cbor2==6.3.0 msgpack==1.2.4 msgspec==0.22.0
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys
from importlib.metadata import version

import cbor2
import msgpack
import msgspec

DATA = bytes.fromhex("c0ffee")
print(*(f"{package} {version(package)}" for package in ("cbor2", "msgpack", "msgspec")))
packers = {
    "cbor2": (lambda value: cbor2.dumps(value, canonical=True), cbor2.loads),
    "msgpack": (msgpack.packb, msgpack.unpackb),
    "msgspec": (msgspec.msgpack.encode, msgspec.msgpack.decode),
}
seen = {}
for name, (pack, unpack) in packers.items():
    for value in (DATA, bytearray(DATA), memoryview(DATA)):
        seen[name, type(value)] = unpack(pack(value))
        print(f"{name}: a {type(value).__name__} is {pack(value).hex()} and comes back as {seen[name, type(value)]}")
others = {key for key, value in seen.items() if value != DATA}
is_so = others == {("cbor2", memoryview)} and seen["cbor2", memoryview] == list(DATA)
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
