#!/bin/bash
# Expected: promql-parser reads a PromQL query and writes it again, with `str` on one line and with `prettify` on many. What it writes is
#   the same query. PromQL's durations have milliseconds: `metric[1500ms]`, or `offset 1s500ms`.
# Happens: `str` drops the milliseconds. A range of 1500 ms becomes one of 1 s, `offset 500ms` becomes `offset 0s`, and a range of 500 ms
#   becomes 0 s, which PromQL refuses. `prettify` keeps them.
# Versions: promql-parser 0.11.0, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install promql-parser==0.11.0
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys
from datetime import timedelta
from importlib.metadata import version

import promql_parser


def length(query):
    try:
        return promql_parser.parse(query).range
    except ValueError:
        return "refused"


print("promql-parser", version("promql-parser"))
seen = {}
for text, milliseconds in (("2s", 2000), ("1m30s", 90_000), ("1500ms", 1500), ("1m1ms", 60_001), ("500ms", 500)):
    tree = promql_parser.parse(f"metric[{text}]")
    exact = timedelta(milliseconds=milliseconds)
    assert tree.range == length(tree.prettify()) == exact
    seen[text] = length(str(tree))
    whole = timedelta(seconds=milliseconds // 1000)
    print(f"metric[{text}]: str {tree}, prettify {tree.prettify()}; read again {seen[text]}")
    seen[text] = seen[text] == (whole or "refused")
is_so = all(seen.values()) and str(promql_parser.parse("metric offset 500ms")).endswith("offset 0s")
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
