#!/bin/bash
# Expected: hypothesis draws only instances that msgspec would decode, as it does for the limits of annotated-types.
#   A trace's row declares `input_length: Annotated[int, msgspec.Meta(ge=1)]`.
# Happens: `from_type` and `builds` ignore `msgspec.Meta`, and msgspec does not check constructors. So a property test gets
#   rows with 0 or -1 tokens, which msgspec encodes and then refuses to decode.
# Versions: hypothesis 6.170.15, msgspec 0.22.0, annotated-types 0.8.0, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install hypothesis==6.170.15 msgspec==0.22.0 annotated-types==0.8.0
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys
from importlib.metadata import version
from typing import Annotated

import annotated_types
import msgspec
from hypothesis import find, strategies
from hypothesis.errors import NoSuchExample


class Row(msgspec.Struct):
    input_length: Annotated[int, msgspec.Meta(ge=1)]


class Limited(msgspec.Struct):
    input_length: Annotated[int, annotated_types.Ge(1)]


def least_below_one(strategy):
    """Return the simplest instance without tokens that the strategy draws, or None."""
    try:
        return find(strategy, lambda row: row.input_length < 1)
    except NoSuchExample:
        return None


def is_decoded(row):
    try:
        return msgspec.json.decode(msgspec.json.encode(row), type=type(row)) == row
    except msgspec.ValidationError as error:
        print("msgspec:", error)
        return False


for name in ("hypothesis", "msgspec", "annotated-types"):
    print(name, version(name))
drawn = [least_below_one(strategies.from_type(Row)), least_below_one(strategies.builds(Row))]
limited = least_below_one(strategies.from_type(Limited))
print(f"with msgspec.Meta(ge=1): {drawn[0]}, {drawn[1]}; with annotated_types.Ge(1): {limited}")
is_so = None not in drawn and not is_decoded(drawn[0]) and limited is None
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
