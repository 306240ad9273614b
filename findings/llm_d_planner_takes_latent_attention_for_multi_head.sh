#!/bin/bash
# Expected: llm-d-planner estimates the KV cache "for MHA/GQA/MQA/MLA". DeepSeek V3.2 has the latent attention (MLA) of DeepSeek V3, with
#   the same `kv_lora_rank` and `qk_rope_head_dim` in its config.json, so that each token has 70,272 bytes in bfloat16, and the keys of
#   the indexer that picks tokens.
# Happens: only two names of architectures count as MLA, those of DeepSeek V2 and V3. For all others the same numbers are taken for 128 KV heads:
#   1,748,992 bytes a token, 25 times as many, without a warning. So a plan for DeepSeek V3.2 has room for one request where there is room
#   for more than twenty.
# Versions: llm-d-planner 0.3.3, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install llm-d-planner==0.3.3
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys
from importlib.metadata import version
from types import SimpleNamespace

from planner.capacity_planner import KVCacheDetail

CONFIG = {  # of DeepSeek V3 and V3.2
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
}
print("llm-d-planner", version("llm-d-planner"))
latent = CONFIG["num_hidden_layers"] * (CONFIG["kv_lora_rank"] + CONFIG["qk_rope_head_dim"]) * 2
seen = {}
for name in ("DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM"):
    cache = KVCacheDetail("model", SimpleNamespace(architectures=[name], **CONFIG), context_len=131_072)
    seen[name] = cache.per_token_memory_bytes
    print(f"{name}: {cache.attention_type}, {seen[name]} bytes a token, {cache.kv_cache_size_gb:.1f} GiB for 131,072 tokens")
is_so = seen == {"DeepseekV3ForCausalLM": latent, "DeepseekV32ForCausalLM": 2 * 61 * 128 * (7168 // 128) * 2}
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
