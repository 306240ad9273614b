#!/bin/bash
# Expected: a condition of a chat template has the same result in Python (jinja2, as transformers and vLLM use it) and in JavaScript
#   with @huggingface/jinja, which is "specifically designed for parsing and rendering ML chat templates". `tools == []` is true
#   without tools, and the string "1" is not the number 1.
# Happens: `==` and `!=` compare as JavaScript's loose operators do. No list or object is equal to another one, so that `tools != []`
#   is true with an empty list, and "1" is equal to 1, and "" to 0 and to false. None of them is an error, and the prompt is
#   another one than the server's.
# Versions: @huggingface/jinja 0.5.11, jinja2 3.1.6, Python 3.11. Needs npm.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install jinja2==3.1.6
cd "$folder"
npm install --silent --no-audit --no-fund --ignore-scripts @huggingface/jinja@0.5.11
cat > render.mjs <<'JAVASCRIPT'
import { readFileSync } from "node:fs";
import { Template } from "@huggingface/jinja";
const [templates, context] = JSON.parse(readFileSync(0, "utf8"));
console.log(JSON.stringify(templates.map((template) => new Template(template).render(context))));
JAVASCRIPT
venv/bin/python - <<'PYTHON'
import json
import subprocess
import sys
from importlib.metadata import version

from jinja2.sandbox import ImmutableSandboxedEnvironment

CONTEXT = {"tools": [], "role": {"name": "user"}, "text": "1", "empty": ""}
CONDITIONS = ["tools == []", "tools != []", "role == {'name': 'user'}", "text == 1", "empty == 0", "empty == false", "text == '1'"]
TEMPLATES = [f"{{{{ 'yes' if {condition} else 'no' }}}}" for condition in CONDITIONS]
installed = json.load(open("node_modules/@huggingface/jinja/package.json"))["version"]
print("@huggingface/jinja", installed, "jinja2", version("jinja2"))
answer = subprocess.run(["node", "render.mjs"], input=json.dumps([TEMPLATES, CONTEXT]), stdout=subprocess.PIPE, text=True, check=True)
in_javascript = json.loads(answer.stdout)
in_python = [ImmutableSandboxedEnvironment().from_string(template).render(**CONTEXT) for template in TEMPLATES]
for condition, ours, theirs in zip(CONDITIONS, in_python, in_javascript, strict=True):
    print(f"{condition}: {ours} in Python, {theirs} in JavaScript")
is_so = [ours == theirs for ours, theirs in zip(in_python, in_javascript, strict=True)] == [False] * 6 + [True]
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
