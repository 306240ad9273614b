"""Makes small LoRA adapters with random weights for `qwen3`, in PEFT's format."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tests.vllm.stock.checkpoints import SHAPE

if TYPE_CHECKING:
    from pathlib import Path

RANK = 4
_LAYERS = 2
_WIDTH = 0.2  # With this standard deviation, an adapter changes the KV of every token.
_QUERIES = SHAPE["num_attention_heads"] * SHAPE["head_dim"]
_KEYS = SHAPE["num_key_value_heads"] * SHAPE["head_dim"]
_SIZES = {"q_proj": _QUERIES, "k_proj": _KEYS, "v_proj": _KEYS}


def make(folder: Path, seed: int) -> Path:
    """Write a LoRA adapter of the attention's projections to `folder`, replacing an existing one; return `folder`."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * _WIDTH

    weights = {}
    for layer in range(_LAYERS):
        for module, size in _SIZES.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = draw(RANK, SHAPE["hidden_size"])
            weights[f"{name}.lora_B.weight"] = draw(size, RANK)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    config: dict[str, object] = {"r": RANK, "lora_alpha": 2 * RANK, "lora_dropout": 0.0, "bias": "none"}
    config |= {"peft_type": "LORA", "task_type": "CAUSAL_LM", "target_modules": list(_SIZES)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
