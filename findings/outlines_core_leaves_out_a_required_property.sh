#!/bin/bash
# Expected: the regular expression that outlines-core builds of a JSON schema matches only texts that the schema allows, or the
#   schema is refused, as others that are not supported are. JSON Schema lets `required` name a property that `properties`
#   does not describe: it must be there, with any value.
# Happens: such a name is ignored. The expression matches objects without the property, which the schema forbids, and does not
#   match those with it. So each answer that is guided by it fails the validation. Known: dottxt-ai/outlines-core issue 152.
# Versions: outlines-core 0.2.14, jsonschema 4.26.0, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install outlines-core==0.2.14 jsonschema==4.26.0
cd "$folder"
venv/bin/python - <<'PYTHON'
import json
import re
import sys
from importlib.metadata import version

from jsonschema import Draft202012Validator
from outlines_core.json_schema import build_regex_from_schema

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name", "arguments"]}
Draft202012Validator.check_schema(SCHEMA)
pattern = build_regex_from_schema(json.dumps(SCHEMA))

print("outlines-core", version("outlines-core"))
seen = []
for text in ('{"name":"find"}', '{"name":"find","arguments":1}', '{"name":"find","arguments":{}}'):
    matches = re.fullmatch(pattern, text) is not None
    valid = Draft202012Validator(SCHEMA).is_valid(json.loads(text))
    seen.append((matches, valid))
    print(f"{text}: matches {matches}, valid {valid}")
is_so = seen == [(True, False), (False, True), (False, True)]
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
