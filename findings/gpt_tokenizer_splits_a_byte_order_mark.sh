#!/bin/bash
# Expected: gpt-tokenizer is "a port of OpenAI's tiktoken" and gives its tokens. The byte order mark U+FEFF, with which many source files
#   begin that stand in prompts, is a token of cl100k_base and of o200k_base, and "U+FEFF using", as C# begins, and U+FEFF twice are tokens
#   as well.
# Happens: gpt-tokenizer does not know these tokens: the mark becomes two or three other ones, with the same bytes. `countTokens` counts too
#   many, and the ids and the hashes of the first block, and so of all that follow, are not those of tiktoken. js-tiktoken has the right
#   ones.
# Versions: gpt-tokenizer 4.0.0, js-tiktoken 1.0.21 (npm; tiktoken's ranks are from it), tiktoken 0.14.0, Python 3.11. Needs npm.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install tiktoken==0.14.0
cd "$folder"
npm install --silent --no-audit --no-fund --ignore-scripts gpt-tokenizer@4.0.0 js-tiktoken@1.0.21
cat >encode.mjs <<'JAVASCRIPT'
import { Tiktoken } from "js-tiktoken/lite";

const [name, texts] = JSON.parse(process.argv[2]);
const { default: ranks } = await import(`js-tiktoken/ranks/${name}`);
const gpt = await import(`gpt-tokenizer/encoding/${name}`);
const js = new Tiktoken(ranks);
const encoded = texts.map((text) => [gpt.encode(text), gpt.countTokens(text), js.encode(text)]);
console.log(JSON.stringify([ranks, encoded]));
JAVASCRIPT
venv/bin/python - <<'PYTHON'
import base64
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import tiktoken

TEXTS = ["using System;", "\ufeff", "a\ufeff", "\ufeffusing System;", "\ufeff\ufeff"]
print("gpt-tokenizer", json.loads(Path("node_modules/gpt-tokenizer/package.json").read_text())["version"], "tiktoken", version("tiktoken"))
is_so = True
for name in ("cl100k_base", "o200k_base"):
    answer = subprocess.run(["node", "encode.mjs", json.dumps([name, TEXTS])], capture_output=True, check=True).stdout
    data, encoded = json.loads(answer)
    ranks = {}
    for line in data["bpe_ranks"].splitlines():
        _, first, *tokens = line.split()
        ranks.update({base64.b64decode(token): rank for rank, token in enumerate(tokens, int(first))})
    encoding = tiktoken.Encoding(name, pat_str=data["pat_str"], mergeable_ranks=ranks, special_tokens=data["special_tokens"])
    for text, (tokens, count, others) in zip(TEXTS, encoded, strict=True):
        right = encoding.encode(text)
        print(f"{name} {text!a}: tiktoken {right}, js-tiktoken {others}, gpt-tokenizer {tokens}, {count} tokens")
        has_mark = "\ufeff" in text
        same_bytes = encoding.decode(tokens) == text
        is_so &= others == right and same_bytes and (tokens != right) == has_mark and (count > len(right)) == has_mark
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
