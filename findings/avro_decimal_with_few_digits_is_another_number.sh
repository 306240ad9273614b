#!/bin/bash
# Expected: a decimal in Avro is written as the unscaled number for the schema's scale: 1.2 with scale 3 as 1200, so that it is read as
#   1.200. Python's avro refuses a decimal with more digits than the scale, so that those it takes keep their value. Java
#   brings it to the scale (AVRO-2837).
# Happens: the digits are written as they stand, whatever the decimal's own exponent is, and read with the schema's scale: 1.2 becomes 0.012,
#   100 becomes 0.100 and 1E+2 becomes 0.001, in bytes and in fixed, without an error. A cost of 5 is 0.005 for each reader.
#   fastavro writes all of them right.
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
from decimal import Decimal
from importlib.metadata import version

import avro.datafile
import avro.io
import avro.schema
import fastavro

DECIMAL = {"logicalType": "decimal", "precision": 9, "scale": 3}
SCHEMA = {
    "type": "record",
    "name": "request",
    "fields": [
        {"name": "cost", "type": {"type": "bytes", **DECIMAL}},
        {"name": "price", "type": {"type": "fixed", "name": "price_bytes", "size": 8, **DECIMAL}},
    ],
}


def written_by_avro(records):
    file = io.BytesIO()
    writer = avro.datafile.DataFileWriter(file, avro.io.DatumWriter(), avro.schema.parse(json.dumps(SCHEMA)))
    for record in records:
        writer.append(record)
    writer.flush()
    return file.getvalue()


def written_by_fastavro(records):
    file = io.BytesIO()
    fastavro.writer(file, SCHEMA, records)
    return file.getvalue()


print("avro", version("avro"), "fastavro", version("fastavro"))
numbers = [Decimal(text) for text in ("1.234", "1.200", "1.2", "5", "100", "1E+2", "-7.25")]
records = [{"cost": number, "price": number} for number in numbers]
seen, is_so = {}, True
for writer, content in (("avro", written_by_avro(records)), ("fastavro", written_by_fastavro(records))):
    by_avro = list(avro.datafile.DataFileReader(io.BytesIO(content), avro.io.DatumReader()))
    by_fastavro = list(fastavro.reader(io.BytesIO(content)))
    seen[writer] = [record["cost"] for record in by_fastavro]
    same = by_avro == by_fastavro and all(record["cost"] == record["price"] for record in by_avro)
    print(f"written by {writer}:", *(f"{number} is {again}," for number, again in zip(numbers, seen[writer], strict=True)),
          "the same for both readers" if same else "another one for the other reader")
    is_so &= same
is_so &= seen["fastavro"] == numbers
is_so &= seen["avro"] == [Decimal(text) for text in ("1.234", "1.2", "0.012", "0.005", "0.1", "0.001", "-0.725")]
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
