#!/bin/bash
# Expected: when a reader's schema has a field that the writer's has not, its default is read. By Avro's specification the default of bytes and
#   fixed is a string whose characters 0 to 255 are the bytes: "\u00ff\u0000" for a fixed of two bytes is ff 00.
# Happens: Python's avro encodes the string as UTF-8: c3 bf 00, three bytes for a fixed of two, and two for the one byte of "\u00ff". They
#   cannot be told from a value that was written. fastavro gives the string itself, which is known: fastavro issue 869. The same
#   bytes as values are read right by both.
# Versions: avro 1.12.2, fastavro 1.13.1, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install avro==1.12.2 fastavro==1.13.1
cd "$folder"
venv/bin/python - <<'PYTHON'
import io
import json
import sys
from importlib.metadata import version

import avro.io
import avro.schema
import fastavro

OLD = {"type": "record", "name": "block", "fields": [{"name": "layer", "type": "int"}]}
NEW = {
    "type": "record",
    "name": "block",
    "fields": [
        {"name": "layer", "type": "int"},
        {"name": "hash", "type": {"type": "fixed", "name": "hash_bytes", "size": 2}, "default": "\u00ff\u0000"},
        {"name": "salt", "type": "bytes", "default": "\u00ff"},
    ],
}


def by_avro(writer, reader, record):
    content = io.BytesIO()
    writer, reader = (avro.schema.parse(json.dumps(schema)) for schema in (writer, reader))
    avro.io.DatumWriter(writer).write(record, avro.io.BinaryEncoder(content))
    content.seek(0)
    return avro.io.DatumReader(writer, reader).read(avro.io.BinaryDecoder(content))


def by_fastavro(writer, reader, record):
    content = io.BytesIO()
    fastavro.schemaless_writer(content, writer, record)
    content.seek(0)
    return fastavro.schemaless_reader(content, writer, reader)


print("avro", version("avro"), "fastavro", version("fastavro"))
full = {"layer": 1, "hash": b"\xff\x00", "salt": b"\xff"}
is_so = True
for name, read in (("avro", by_avro), ("fastavro", by_fastavro)):
    as_values, as_defaults = read(NEW, NEW, full), read(OLD, NEW, {"layer": 1})
    print(f"{name}: written {as_values}, by default {ascii(as_defaults)}")
    strings = {"hash": "\u00ff\u0000", "salt": "\u00ff"}
    expected = strings if name == "fastavro" else {key: text.encode() for key, text in strings.items()}
    is_so &= as_values == full and as_defaults == {"layer": 1, **expected}
is_so &= len(by_avro(OLD, NEW, {"layer": 1})["hash"]) == 3
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
