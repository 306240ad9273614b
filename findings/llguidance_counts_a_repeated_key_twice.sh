#!/bin/bash
# Expected: an answer that llguidance guided by a JSON schema is valid for the schema. Its documentation promises a grammar that
#   conforms to the schema, or an error, and names the departures. What it cannot guide by (`uniqueItems`,
#   `not`) is an error.
# Happens: it accepts `minProperties`, and counts what is written, not the names. An object that has one name twice passes for
#   one with two properties. A parser of JSON keeps one of them, so the answer is not valid, and the first value is lost.
# Versions: llguidance 1.9.1, jsonschema 4.26.0, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install llguidance==1.9.1 jsonschema==4.26.0
cd "$folder"
venv/bin/python - <<'PYTHON'
import json
import sys
from importlib.metadata import version

from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer

SCHEMA = {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 2}
tokenizer = LLTokenizer("byte")


def matcher_of(schema):
    return LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(schema)))


def is_accepted(text):
    matcher, tokens = matcher_of(SCHEMA), tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


print("llguidance", version("llguidance"))
refused = matcher_of({"type": "array", "uniqueItems": True}).get_error()
print("uniqueItems:", refused)
seen = []
for text in ('{"a":1}', '{"a":1,"b":2}', '{"a":1,"a":2}'):
    parsed = json.loads(text)
    seen.append((is_accepted(text), Draft202012Validator(SCHEMA).is_valid(parsed)))
    print(f"{text}: accepted {seen[-1][0]}, parsed {parsed}, valid {seen[-1][1]}")
is_so = bool(refused) and seen == [(False, False), (True, True), (True, False)]
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
