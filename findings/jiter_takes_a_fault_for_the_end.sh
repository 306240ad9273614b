#!/bin/bash
# Expected: `jiter.from_json` with `partial_mode` takes incomplete JSON, such as the part of an LLM's answer that has arrived: the text may end
#   anywhere. What is wrong and not incomplete is a ValueError, as without the option. jiter does so for `[1,,2]`.
# Happens: a missing comma, a wrong bracket and anything behind the value are taken for the end. The rest of the text is dropped, the part
#   before it is returned, and no error tells that there was more. partial-json-parser refuses such texts.
#   Known: pydantic/jiter issue 162, open.
# Versions: jiter 0.19.0, partial-json-parser 0.2.1.1.post7, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install jiter==0.19.0 partial-json-parser==0.2.1.1.post7
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys
from importlib.metadata import version

import jiter
import partial_json_parser

TEXTS = {
    '{"city": "Bonn", "days": [1': ({"city": "Bonn", "days": [1]}, {"city": "Bonn", "days": [1]}),
    '{"city": "Bonn" "days": [1, 2]}': ({"city": "Bonn"}, "refused"),
    '{"days": [1 2], "city": "Bonn"}': ({"days": [1]}, "refused"),
    '{"days": [1}, "city": "Bonn"}': ({"days": [1]}, "refused"),
    '{"city": "Bonn"} {"city": "Köln"}': ({"city": "Bonn"}, "refused"),
    "[1,,2]": ("refused", "refused"),
}


def outcome(parse, text):
    try:
        return parse(text)
    except (ValueError, AssertionError):
        return "refused"


print("jiter", version("jiter"), "partial-json-parser", version("partial-json-parser"))
seen = {}
for text in TEXTS:
    by_jiter = outcome(lambda text: jiter.from_json(text.encode(), partial_mode=True), text)
    seen[text] = by_jiter, outcome(partial_json_parser.loads, text)
    print(f"{text}: jiter {seen[text][0]}, partial-json-parser {seen[text][1]}")
is_so = seen == TEXTS and all(outcome(lambda text: jiter.from_json(text.encode()), text) == "refused" for text in TEXTS)
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
