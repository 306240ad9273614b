#!/bin/bash
# Expected: lm-format-enforcer lets a model write only what its JSON schema allows. For `{"enum": [true, false]}` that is `true` or `false`.
# Happens: the only texts it lets through are `True` and `False`, which are Python's and no JSON. `{"type": "boolean"}` is right. A `null`
#   in an enum and a `true` as `const` raise an error. Known: noamgat/lm-format-enforcer issue 183, open.
# Versions: lm-format-enforcer 0.11.3, pydantic 2.14.4, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install lm-format-enforcer==0.11.3 pydantic==2.14.4
cd "$folder"
venv/bin/python - <<'PYTHON'
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
TEXTS = ("true", "false", "True", "False")
seen = {}
for name, schema in (("boolean", {"type": "boolean"}), ("enum", {"enum": [True, False]})):
    seen[name] = [text for text in TEXTS if allows(schema, text)]
    print(f"{schema} allows {seen[name]}")
is_so = seen == {"boolean": ["true", "false"], "enum": ["True", "False"]}
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
