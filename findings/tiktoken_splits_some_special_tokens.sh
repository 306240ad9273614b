#!/bin/bash
# Expected: `encode` with allowed_special="all" gives a text that is one special token's name that token's id, as
#   `encode_single_token` does. If one name begins with another, either the longest one wins, or always the first one.
# Happens: all names are put into one regular expression in the order of a hash table, and the first alternative that fits
#   wins. So "<e>1" is found although "<e>" is a token, and "<e>10" is not: it becomes "<e>1" and a plain "0". What a model
#   gets depends on the hashes of the names, and neither the order nor the ids of the special tokens change it.
# Versions: tiktoken 0.14.0, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install tiktoken==0.14.0
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys
from importlib.metadata import version

import tiktoken

NAMES = ["<tool>", "<tool>:x", "<e>", "<e>1", "<e>10"]


def found(names):
    """Return the names that `encode` finds as one token, with ids in the order of the names."""
    encoding = tiktoken.Encoding(
        "example",
        pat_str=r"\S+|\s+",
        mergeable_ranks={bytes([byte]): byte for byte in range(256)},
        special_tokens={name: 256 + place for place, name in enumerate(names)},
    )
    for name in names:
        ids = encoding.encode(name, allowed_special="all")
        print(f"{name}: {ids}, encode_single_token: {encoding.encode_single_token(name)}")
    return {name for name in names if encoding.encode(name, allowed_special="all") == [encoding.encode_single_token(name)]}


print("tiktoken", version("tiktoken"))
forwards = found(NAMES)
print("the same names the other way round:")
backwards = found(NAMES[::-1])
print("split:", sorted(set(NAMES) - forwards), "and", sorted(set(NAMES) - backwards))
is_so = forwards != set(NAMES) and {"<tool>:x", "<e>1"} <= forwards and "<e>10" not in forwards
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
