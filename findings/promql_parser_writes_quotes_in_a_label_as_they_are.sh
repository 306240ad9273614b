#!/bin/bash
# Expected: promql-parser reads a PromQL query and writes it again, with `str` on one line and with `prettify` on many. What it writes is
#   the same query: a quote, a backslash or a line break in a label's value is written with a backslash, as it was read.
# Happens: `str` writes the value as it is. `path="C:\\new"` becomes `path="C:\new"`, in which `\n` is a line break, so that the query looks
#   for another label. A regular expression as `pod=~"vllm-\\d+"`, and a quote, become texts that PromQL refuses. `prettify` is right.
# Versions: promql-parser 0.11.0, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install promql-parser==0.11.0
cd "$folder"
venv/bin/python - <<'PYTHON'
import json
import sys
from importlib.metadata import version

import promql_parser


def value(query):
    try:
        return promql_parser.parse(query).matchers.matchers[0].value
    except ValueError:
        return None


print("promql-parser", version("promql-parser"))
seen = {}
for text in ("plain", "a.b", "vllm-\\d+", 'say "yes"', "C:\\new"):
    tree = promql_parser.parse(f"metric{{label=~{json.dumps(text)}}}")
    assert value(tree.prettify()) == tree.matchers.matchers[0].value == text
    seen[text] = value(str(tree))
    print(f"{text!r}: str {tree}, prettify {tree.prettify()}; read again {seen[text]!r}")
is_so = seen == {"plain": "plain", "a.b": "a.b", "vllm-\\d+": None, 'say "yes"': None, "C:\\new": "C:\new"}
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
