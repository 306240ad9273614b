#!/bin/bash
# Expected: metadata that GGUFWriter accepts comes back from GGUFReader as it was written. GGUF's specification says that arrays
#   "can be nested", and the writer writes a list of lists as an array of arrays, with each one's length.
# Happens: `contents()` returns one flat list. So [[1, 2], [3]], [[1], [2, 3]] and [1, 2, 3] are the same to a reader, although
#   their files differ. `gguf-new-metadata` copies metadata with it. A FIXME in the
#   reader's source knows of the flattening.
# Versions: gguf 0.19.0, numpy 2.4.6, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install gguf==0.19.0 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys
from importlib.metadata import version
from pathlib import Path

from gguf import GGUFReader, GGUFWriter

VALUES = [[1, 2, 3], [[1, 2], [3]], [[1], [2, 3]]]


def written_and_read(value):
    """Return the file with the value as metadata, and what the reader says about it."""
    writer = GGUFWriter("value.gguf", "llama")
    writer.add_array("groups", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return Path("value.gguf").read_bytes(), GGUFReader("value.gguf").get_field("groups").contents()


print("gguf", version("gguf"))
files = set()
read = []
for value in VALUES:
    data, answer = written_and_read(value)
    files.add(data)
    read.append(answer)
    print(f"written {value}, read {answer}")
print(f"{len(files)} different files")
is_so = len(files) == 3 and read == [[1, 2, 3]] * 3
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
