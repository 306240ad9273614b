"""What a stock vLLM says of a command line, and that the sizes from its configuration are those of its engine."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvoffload_vllm import doctor_child
from tests.vllm.adapter.stand_ins import on_vllm
from tests.vllm.adapter.test_doctor import GOOD
from tests.vllm.adapter.test_model_sizes import DEEPSEEK_V2_LITE, LLAMA_8B, QWEN3_8B, save, stock_sizes

TRANSFER = json.dumps(GOOD)
OURS = f"--kv-transfer-config '{TRANSFER}'"
DENSE: dict[str, Any] = {
    "torch_dtype": "bfloat16",
    "vocab_size": 512,
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}


def model(model_type: str, architecture: str, **fields: object) -> dict[str, Any]:
    return {**DENSE, "model_type": model_type, "architectures": [architecture], **fields}


PLAIN = {
    "llama": LLAMA_8B,
    "qwen3": QWEN3_8B,
    "deepseek_v2": DEEPSEEK_V2_LITE,
    "deepseek_v3": {
        **DEEPSEEK_V2_LITE,
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "q_lora_rank": 128,
    },
    "qwen2": model("qwen2", "Qwen2ForCausalLM", use_sliding_window=False),
    "mistral": model("mistral", "MistralForCausalLM", sliding_window=None, head_dim=64),
    "mixtral": model("mixtral", "MixtralForCausalLM", num_local_experts=4, sliding_window=None),
    "qwen3_moe": model("qwen3_moe", "Qwen3MoeForCausalLM", head_dim=64, **EXPERTS),
    "phi3": model("phi3", "Phi3ForCausalLM", pad_token_id=0, sliding_window=None),
    "granite": model("granite", "GraniteForCausalLM"),
    "olmo2": model("olmo2", "Olmo2ForCausalLM"),
}
OTHERS = {
    "a window in some layers": model("gemma2", "Gemma2ForCausalLM", head_dim=64, sliding_window=1024),
    "a window in all layers": model("mistral", "MistralForCausalLM", sliding_window=1024, head_dim=64),
    "recurrent layers": model("lfm2", "Lfm2ForCausalLM", full_attn_idxs=[1, 3], conv_L_cache=3),
    "shared layers": model("gemma3n_text", "Gemma3nForCausalLM"),
}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTHONHASHSEED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def told(line: str, **request: bool) -> dict[str, Any]:
    return doctor_child.examine(shlex.split(line), **request)


@on_vllm
@pytest.mark.parametrize("name", PLAIN)
def test_sizes_from_vllms_configuration_are_those_of_its_engine(name: str, tmp_path: Path) -> None:
    folder = save(tmp_path, PLAIN[name])
    tokens = 16 if "kv_lora_rank" in PLAIN[name] else 32
    found = told(f"{folder} --block-size {tokens} --skip-tokenizer-init")["sizes"]
    page, block = stock_sizes(folder, tokens, "auto", "auto")
    assert (found["page_bytes"], found["page_bytes"] * found["pages"]) == (page, block)


@on_vllm
@pytest.mark.parametrize(
    ("options", "page", "pages"),
    [
        ("", 2 * 8 * 128 * 2, 36),
        ("-tp 2", 2 * 4 * 128 * 2, 36),
        ("-tp 16", 2 * 128 * 2, 36),
        ("-pp 4", 2 * 8 * 128 * 2, 9),
        ("--kv-cache-dtype fp8", 2 * 8 * 128, 36),
        ("--dtype float32", 2 * 8 * 128 * 4, 36),
    ],
)
def test_sizes_follow_the_ranks_and_dtypes_of_the_line(
    options: str, page: int, pages: int, tmp_path: Path
) -> None:
    found = told(f"{save(tmp_path, QWEN3_8B)} --block-size 32 {options}")["sizes"]
    assert (found["page_bytes"], found["pages"], found["tokens"]) == (32 * page, pages, 32)


@on_vllm
@pytest.mark.parametrize("name", OTHERS)
def test_sizes_that_do_not_follow_from_the_configuration_are_unknown(name: str, tmp_path: Path) -> None:
    assert "depend on" in told(f"{save(tmp_path, OTHERS[name])} --block-size 32")["sizes"]["unknown"]
