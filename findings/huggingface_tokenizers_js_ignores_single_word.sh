#!/bin/bash
# Expected: an added token with `"single_word": true` in a tokenizer.json is found only where it stands as a word of its own, as the
#   documentation of AddedToken says. Python's tokenizers does so, and @huggingface/tokenizers, which reads the same file
#   in JavaScript, has the option in its AddedToken.
# Happens: @huggingface/tokenizers reads the option and ignores it. "pad" is found inside "padding". The ids are others than the server's,
#   and a prompt's number of tokens and the hashes of its blocks are others too.
# Versions: @huggingface/tokenizers 0.2.0 (npm), tokenizers 0.23.3 (Python), Python 3.11. Needs npm.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install tokenizers==0.23.3
cd "$folder"
npm install --silent --no-audit --no-fund --ignore-scripts @huggingface/tokenizers@0.2.0
cat > encode.mjs <<'JAVASCRIPT'
import { readFileSync } from "node:fs";
import { Tokenizer } from "@huggingface/tokenizers";
const tokenizer = new Tokenizer(JSON.parse(readFileSync("tokenizer.json", "utf8")), {});
console.log(JSON.stringify(JSON.parse(readFileSync(0, "utf8")).map((text) => tokenizer.encode(text).tokens)));
JAVASCRIPT
venv/bin/python - <<'PYTHON'
import json
import subprocess
import sys
from importlib.metadata import version

from tokenizers import AddedToken, Tokenizer, models

TEXTS = ["pad", "a pad", "padding", "unpad"]
tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate("adginpu ")}, merges=[]))
tokenizer.add_tokens([AddedToken("pad", single_word=True)])
tokenizer.save("tokenizer.json")
installed = json.load(open("node_modules/@huggingface/tokenizers/package.json"))["version"]
print("@huggingface/tokenizers", installed, "tokenizers", version("tokenizers"))
answer = subprocess.run(["node", "encode.mjs"], input=json.dumps(TEXTS), stdout=subprocess.PIPE, text=True, check=True)
in_javascript = json.loads(answer.stdout)
in_python = [tokenizer.encode(text).tokens for text in TEXTS]
for text, ours, theirs in zip(TEXTS, in_python, in_javascript, strict=True):
    print(f"{text!r}: {ours} in Python, {theirs} in JavaScript")
is_so = in_python[:2] == in_javascript[:2] and "pad" not in in_python[2] + in_python[3]
is_so &= in_javascript[2][0] == "pad" and in_javascript[3][-1] == "pad"
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
