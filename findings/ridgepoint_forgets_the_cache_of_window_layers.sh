#!/bin/bash
# Expected: ridgepoint has the "KV cache correct to the byte", and says how many sequences of a length fit. A layer with a sliding window
#   keeps the last tokens of the window, so that at a length up to the window it needs what a layer with full attention needs.
# Happens: only the layers whose type has "full" in its name are counted, at every length. A model whose 24 layers have a window of 4096
#   needs 24 times as much at 4096 tokens as ridgepoint says, and one that alternates as gpt-oss does needs twice as much: it says
#   that 8001 and 666 sequences fit where 333 do. With linear attention, for which the rule was made, it is right.
#   hf-mem mended the same: alvarobartt/hf-mem pull request 61.
# Versions: ridgepoint 0.1.2, huggingface_hub 2.4.0, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install ridgepoint==0.1.2 huggingface_hub==2.4.0
cd "$folder"
HF_HUB_OFFLINE=1 HF_HOME="$folder/hub" venv/bin/python - <<'PYTHON'
import json
import os
import pathlib
import sys
from importlib.metadata import version

import ridgepoint

LENGTH = WINDOW = 4096
LAYERS, HEADS, HEAD_SIZE, BYTES = 24, 8, 64, 2
NEEDED = 2 * LAYERS * HEADS * HEAD_SIZE * BYTES * LENGTH
CONFIG = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD_SIZE,
    "sliding_window": WINDOW,
    "torch_dtype": "bfloat16",
}
TYPES = {
    "full": ["full_attention"] * LAYERS,
    "alternating": ["sliding_attention", "full_attention"] * (LAYERS // 2),
    "window": ["sliding_attention"] * LAYERS,
}
print("ridgepoint", version("ridgepoint"))
seen = {}
for name, types in TYPES.items():
    folder = pathlib.Path(os.environ["HF_HOME"], "hub", f"models--example--{name}")
    snapshot = folder / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("1")
    (snapshot / "config.json").write_text(json.dumps({**CONFIG, "layer_types": types}))
    index = {"metadata": {"total_size": 8_000_000_000}, "weight_map": {}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    capacity = json.loads(ridgepoint.fit(f"example/{name}", "a100-80gb", ctx=LENGTH, as_json=True))["capacity"]
    seen[name] = capacity["bytes_per_seq"], capacity["max_sequences"]["best"]
    print(f"{name}, window {WINDOW}: {seen[name][0]:,} bytes for {LENGTH} tokens, {seen[name][1]} sequences; needed {NEEDED:,} bytes")
is_so = [seen[name][0] for name in TYPES] == [NEEDED, NEEDED // 2, NEEDED // LAYERS]
is_so &= seen["window"][1] > 20 * seen["full"][1] and seen["alternating"][1] > 1.9 * seen["full"][1]
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
