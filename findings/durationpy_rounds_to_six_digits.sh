#!/bin/bash
# Expected: durationpy, which Kubernetes' client for Python uses, converts a timedelta to the text of Go's time.Duration and back. Both
#   are exact to the microsecond, so that the timedelta that comes back is the same.
# Happens: `to_str` writes the seconds with six digits in all. 59.999999 seconds become "60s", 54.70957 seconds "54.7096s", and 12.345678 seconds
#   "12.3457s". Below one second nothing is lost. Known: icholy/durationpy pull request 22, open.
# Versions: durationpy 0.11, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install durationpy==0.11
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys
from datetime import timedelta
from importlib.metadata import version

import durationpy

print("durationpy", version("durationpy"))
seen = {}
for seconds in (0.345678, 1.5, 12.345678, 59.999999, 3654.70957):
    delta = timedelta(seconds=seconds)
    text = durationpy.to_str(delta)
    seen[seconds] = text, durationpy.from_str(text) == delta
    print(f"{delta} is written as {text} and comes back as {durationpy.from_str(text)}")
is_so = seen == {
    0.345678: ("345ms678us", True),
    1.5: ("1.5s", True),
    12.345678: ("12.3457s", False),
    59.999999: ("60s", False),
    3654.70957: ("1h54.7096s", False),
}
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
