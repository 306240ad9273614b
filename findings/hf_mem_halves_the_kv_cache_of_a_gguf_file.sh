#!/bin/bash
# Expected: hf-mem estimates the same KV cache for a model's GGUF file as for its Safetensors files. GGUF has the length of a head in
#   `[llm].attention.key_length` and `value_length`. Its specification says that the embedding's length divided by the number of heads
#   holds only if these are missing.
# Happens: hf-mem divides in any case. Qwen3-0.6B has 16 heads of 128 and an embedding of 1024, so that the KV cache of its GGUF file is estimated
#   at one half. From `config.json`, which has `head_dim`, the estimate is right. Unsloth had the same fault (its pull request 4757).
# Versions: hf-mem 0.5.6, gguf 0.19.0, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install hf-mem==0.5.6 gguf==0.19.0
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys
from importlib.metadata import version
from pathlib import Path

import gguf
from hf_mem.gguf.metadata import parse_gguf_metadata
from hf_mem.safetensors.kv_cache import compute_safetensors_kv_cache_size

CONTEXT = 40_960
CONFIG = {  # of Qwen3-0.6B
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_hidden_layers": 28,
    "head_dim": 128,
}


def of_gguf():
    writer = gguf.GGUFWriter("model.gguf", "qwen3")
    writer.add_block_count(CONFIG["num_hidden_layers"])
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(CONFIG["hidden_size"])
    writer.add_head_count(CONFIG["num_attention_heads"])
    writer.add_head_count_kv(CONFIG["num_key_value_heads"])
    writer.add_key_length(CONFIG["head_dim"])
    writer.add_value_length(CONFIG["head_dim"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return parse_gguf_metadata(Path("model.gguf").read_bytes(), experimental=True).kv_cache.cache_size


print("hf-mem", version("hf-mem"))
right = 2 * CONFIG["num_hidden_layers"] * CONFIG["num_key_value_heads"] * CONFIG["head_dim"] * CONTEXT * 2
seen = of_gguf(), compute_safetensors_kv_cache_size(CONFIG, "F16", CONTEXT)
print(f"{CONTEXT} tokens, of GGUF: {seen[0] / 2**30} GiB, of Safetensors: {seen[1] / 2**30} GiB, right: {right / 2**30} GiB")
is_so = seen == (right // 2, right)
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
