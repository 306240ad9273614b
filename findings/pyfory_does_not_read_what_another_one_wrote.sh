#!/bin/bash
# Expected: with `strict=False`, pyfory serializes "custom classes without any registration", as a "drop-in replacement for
#   pickle/cloudpickle". So what one process writes, another one with the same classes and the same options can read.
# Happens: another Fory than the writer raises "TypeDef ... is not registered" until it has written an object of the same class itself, and it
#   makes an UnknownStruct of a dataclass, then too, without an error. With `compatible=False`, which is not the default, it reads both. So
#   a cache is read well by the process that wrote it, and not after a restart.
# Versions: pyfory 1.7.7, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install pyfory==1.7.7
cd "$folder"
venv/bin/python - <<'PYTHON'
import dataclasses
import sys
from importlib.metadata import version

import pyfory


class Plain:
    def __init__(self, block):
        self.block = block


@dataclasses.dataclass
class Record:
    block: int


def read(reader, data):
    try:
        return type(reader.loads(data)).__name__
    except ValueError as error:
        return str(error)


print("pyfory", version("pyfory"))
seen = {}
for options in ({}, {"compatible": False}):
    for value in (Plain(7), Record(7)):
        writer, reader = (pyfory.Fory(xlang=False, ref=True, strict=False, **options) for _ in range(2))
        data = writer.dumps(value)
        answers = read(writer, data), read(reader, data)
        reader.dumps(value)
        seen[type(value).__name__, bool(options)] = *answers, read(reader, data)
        print(f"{options} {type(value).__name__}: the writer reads {answers[0]}, another one {answers[1]},")
        print(f"  and {seen[type(value).__name__, bool(options)][2]} after it has written one")
is_so = seen == {
    ("Plain", False): ("Plain", "TypeDef __main__.Plain is not registered", "Plain"),
    ("Record", False): ("Record", "UnknownStruct", seen["Record", False][2]),
    ("Plain", True): ("Plain", "Plain", "Plain"),
    ("Record", True): ("Record", "Record", "Record"),
}
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
