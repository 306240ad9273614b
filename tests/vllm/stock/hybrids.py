"""Models with recurrent layers and attention: short convolutions, Mamba2 or gated delta nets.

Each model has the shape of a published model family. Groups have several layers, so that a block has several
pages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RECURRENT, FULL = "linear_attention", "full_attention"


def lfm2(shape: Mapping[str, Any]) -> PreTrainedModel:
    """Return a model with short convolutions, as in LFM2."""
    import transformers

    layers = ["conv", "conv", FULL, "conv"] * 2
    config = transformers.Lfm2Config(
        num_hidden_layers=len(layers), layer_types=layers, block_auto_adjust_ff_dim=False, **shape
    )
    return transformers.Lfm2ForCausalLM(config)


def granite4(shape: Mapping[str, Any]) -> PreTrainedModel:
    """Return a model with Mamba2 layers, as in Granite 4, without experts."""
    import transformers

    config = transformers.GraniteMoeHybridConfig(
        num_hidden_layers=4,
        layer_types=[RECURRENT, RECURRENT, FULL, RECURRENT],
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=shape["intermediate_size"],
        attention_multiplier=shape["head_dim"] ** -0.5,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_chunk_size=32,
        **{name: value for name, value in shape.items() if name != "head_dim"},
    )
    return transformers.GraniteMoeHybridForCausalLM(config)


def qwen3_next(shape: Mapping[str, Any]) -> PreTrainedModel:
    """Return a model with gated delta nets, as in Qwen3-Next, without experts."""
    import transformers

    config = transformers.Qwen3NextConfig(
        num_hidden_layers=4,
        layer_types=[RECURRENT, RECURRENT, RECURRENT, FULL],
        mlp_only_layers=[0, 1, 2, 3],
        num_experts=0,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        **shape,
    )
    return transformers.Qwen3NextForCausalLM(config)


def complete_config(folder: Path) -> None:
    """Add the fields that vLLM reads in an LFM2's config and that transformers does not write."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if config["model_type"] == "lfm2":
        path.write_text(json.dumps(config | dict.fromkeys(("conv_dim", "block_dim"), config["hidden_size"])))
