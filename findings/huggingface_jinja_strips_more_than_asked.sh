#!/bin/bash
# Expected: a chat template renders to the same prompt in Python (jinja2, as transformers and vLLM use it) and in JavaScript with
#   @huggingface/jinja, which is "specifically designed for parsing and rendering ML chat templates". So a client can count a
#   prompt's tokens, or compute which blocks of it are cached. Templates of models that think call `content.lstrip('\n')`.
# Happens: `strip`, `lstrip` and `rstrip` ignore their argument and remove all white space. The first line of indented code in an answer
#   loses its indentation, and the prompt is another one than the server's. `strip('"')` removes no quote. Swift's port had the same
#   fault (huggingface/swift-jinja issue 64) and was corrected.
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

CONTEXT = {"content": "\n    return 1\n", "name": '"tool"'}
TEMPLATES = [r"{{ content.lstrip('\n') }}", r"{{ content.strip('\n') }}", "{{ name.strip('\"') }}", "{{ content.strip() }}"]
installed = json.load(open("node_modules/@huggingface/jinja/package.json"))["version"]
print("@huggingface/jinja", installed, "jinja2", version("jinja2"))
answer = subprocess.run(["node", "render.mjs"], input=json.dumps([TEMPLATES, CONTEXT]), stdout=subprocess.PIPE, text=True, check=True)
in_javascript = json.loads(answer.stdout)
in_python = [ImmutableSandboxedEnvironment().from_string(template).render(**CONTEXT) for template in TEMPLATES]
for template, ours, theirs in zip(TEMPLATES, in_python, in_javascript, strict=True):
    print(f"{template}: {ours!r} in Python, {theirs!r} in JavaScript")
is_so = [ours == theirs for ours, theirs in zip(in_python, in_javascript, strict=True)] == [False, False, False, True]
is_so &= in_javascript[0] == "return 1\n" and in_javascript[2] == '"tool"'
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
