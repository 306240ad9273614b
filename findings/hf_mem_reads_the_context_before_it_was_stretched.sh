#!/bin/bash
# Expected: hf-mem with `--experimental` adds the KV cache for the model's whole context to the memory it estimates, unless `--max-model-len`
#   says otherwise. GGUF names the context in `[llm].context_length`.
# Happens: hf-mem takes each key that ends in "context_length", and the last one wins. A model whose context was stretched, with YaRN for
#   example, also has `[llm].rope.scaling.original_context_length`, the length before. llama.cpp's converter writes it after the other one.
#   So 131,072 tokens count as 32,768, and the KV cache is estimated at a quarter, without a warning.
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

LAYERS, HEADS, HEAD_LENGTH, CONTEXT, ORIGINAL = 36, 8, 128, 131_072, 32_768


def kv_cache(is_stretched):
    """Return what hf-mem says of the KV cache of a file with these numbers."""
    writer = gguf.GGUFWriter("model.gguf", "qwen2")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(16 * HEAD_LENGTH)
    writer.add_head_count(16)
    writer.add_head_count_kv(HEADS)
    if is_stretched:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4)
        writer.add_rope_scaling_orig_ctx_len(ORIGINAL)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return parse_gguf_metadata(Path("model.gguf").read_bytes(), experimental=True).kv_cache


print("hf-mem", version("hf-mem"))
right = 2 * LAYERS * HEADS * HEAD_LENGTH * CONTEXT * 2  # keys and values, float16
seen = {}
for is_stretched in (False, True):
    cache = kv_cache(is_stretched)
    seen[is_stretched] = cache.max_model_len, cache.cache_size
    name = "with" if is_stretched else "without"
    print(f"{name} the original length: {cache.max_model_len} tokens, {cache.cache_size / 2**30} GiB of {right / 2**30} GiB")
is_so = seen == {False: (CONTEXT, right), True: (ORIGINAL, right * ORIGINAL // CONTEXT)}
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
