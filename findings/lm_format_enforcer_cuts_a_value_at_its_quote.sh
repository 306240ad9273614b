#!/bin/bash
# Expected: the one value of `{"enum": ["say \"yes\""]}` is written in JSON with a backslash before each inner quote. lm-format-enforcer,
#   which lets a model write what its schema allows, lets it write that.
# Happens: it does not. It takes the quote in the value for the end of the string, so that the model can write only "say ", a value
#   that is not in the enum. A line break in a value must be written as it is, which is no JSON. Backslashes are right. `const`
#   does the same.
# Versions: lm-format-enforcer 0.11.3, pydantic 2.14.4, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install lm-format-enforcer==0.11.3 pydantic==2.14.4
cd "$folder"
venv/bin/python - <<'PYTHON'
import json
import sys
from importlib.metadata import version

from lmformatenforcer import CharacterLevelParserConfig, JsonSchemaParser


def allows(schema, text):
    parser = JsonSchemaParser(schema, config=CharacterLevelParserConfig())
    for character in text:
        if character not in parser.get_allowed_characters():
            return False
        parser = parser.add_character(character)
    return parser.can_end()


print("lm-format-enforcer", version("lm-format-enforcer"))
seen = []
for value in ('say "yes"', "two\nlines", "back\\slash"):
    for schema in ({"enum": [value]}, {"const": value}):
        texts = json.dumps(value), '"say "', f'"{value}"'
        seen.append([text for text in texts if allows(schema, text)])
        print(f"{json.dumps(schema)} allows of {texts}: {seen[-1]}")
is_so = seen == [['"say "']] * 2 + [['"two\nlines"']] * 2 + [['"back\\\\slash"']] * 2
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
