#!/bin/bash
# Expected: strings in a GGUF file are UTF-8, by the format's description. hyllama reads a file's metadata in JavaScript, and the
#   tokens in it are those that the file's tokenizer has, as @huggingface/gguf and gguf, the format's own library, read them.
# Happens: each byte becomes a character of its own, without an error. In the vocabulary of a byte-level tokenizer (GPT-2, Llama 3, Qwen)
#   every token that begins with a space is written with U+0120, and hyllama gives two other characters for it; so do the
#   template and the names of the model. A prompt cannot be encoded with such a vocabulary.
#   node-llama-cpp mended the same in its reader: withcatai/node-llama-cpp issue 418.
# Versions: hyllama 0.2.2, @huggingface/gguf 0.4.6, gguf 0.19.0, Python 3.11. Needs npm.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install gguf==0.19.0 numpy==2.4.6
cd "$folder"
npm install --silent --no-audit --no-fund --ignore-scripts hyllama@0.2.2 @huggingface/gguf@0.4.6
cat > read.mjs <<'JAVASCRIPT'
import { readFileSync } from "node:fs";
import { gguf } from "@huggingface/gguf";
import { ggufMetadata } from "hyllama";
const bytes = readFileSync("model.gguf");
const one = ggufMetadata(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length)).metadata;
const other = (await gguf("model.gguf", { allowLocalFile: true })).metadata;
const names = ["tokenizer.ggml.tokens", "general.name"];
console.log(JSON.stringify([one, other].map((metadata) => names.map((name) => metadata[name]))));
JAVASCRIPT
venv/bin/python - <<'PYTHON'
import json
import subprocess
import sys
from importlib.metadata import version

import gguf
import numpy as np

TOKENS, NAME = ["the", "\u0120the", "\u010a", "abc"], "Mod\u00e8le"
writer = gguf.GGUFWriter("model.gguf", "llama")
writer.add_token_list(TOKENS)
writer.add_name(NAME)
writer.add_tensor("output.weight", np.zeros((1, 32), np.float32))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
reader = gguf.GGUFReader("model.gguf")
by_gguf = [reader.get_field(name).contents() for name in ("tokenizer.ggml.tokens", "general.name")]
installed = [json.load(open(f"node_modules/{name}/package.json"))["version"] for name in ("hyllama", "@huggingface/gguf")]
print("hyllama", installed[0], "@huggingface/gguf", installed[1], "gguf", version("gguf"))
answer = subprocess.run(["node", "read.mjs"], stdout=subprocess.PIPE, text=True, check=True)
by_hyllama, by_huggingface = json.loads(answer.stdout)
for name, seen in (("gguf", by_gguf), ("@huggingface/gguf", by_huggingface), ("hyllama", by_hyllama)):
    print(f"{name}: tokens {ascii(seen[0])}, name {ascii(seen[1])}")
as_latin_1 = [text.encode().decode("latin-1") for text in TOKENS]
is_so = by_gguf == by_huggingface == [TOKENS, NAME]
is_so &= by_hyllama == [as_latin_1, NAME.encode().decode("latin-1")] and as_latin_1 != TOKENS
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
