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
from tests.doctor.trees import DENSE
from tests.vllm.adapter.stand_ins import on_vllm
from tests.vllm.adapter.test_doctor import GOOD
from tests.vllm.adapter.test_model_sizes import LLAMA_8B, MODELS, QWEN3_8B, save, stock_sizes

TRANSFER = json.dumps(GOOD)
OURS = f"--kv-transfer-config '{TRANSFER}'"


def model(model_type: str, architecture: str, **fields: object) -> dict[str, Any]:
    return {**DENSE, "model_type": model_type, "architectures": [architecture], **fields}


PLAIN = {
    **MODELS,
    "phi3": model("phi3", "Phi3ForCausalLM", pad_token_id=0, sliding_window=None),
    "granite": model("granite", "GraniteForCausalLM"),
    "olmo2": model("olmo2", "Olmo2ForCausalLM"),
}
OTHERS = {
    "a window in some layers": model("gemma2", "Gemma2ForCausalLM", head_dim=64, sliding_window=1024),
    "a window in all layers": model("mistral", "MistralForCausalLM", sliding_window=1024, head_dim=64),
    "recurrent layers": model("lfm2", "Lfm2ForCausalLM", full_attn_idxs=[1, 3], conv_L_cache=3),
    "shared layers": model("gemma3n_text", "Gemma3nForCausalLM"),
    "values of another width": model("qwen3", "Qwen3ForCausalLM", head_dim=64, v_head_dim=128),
    "layers of several sizes": model("llama", "LlamaForCausalLM", block_configs=[{}, {}, {}, {}]),
    "no layers": model("llama", "LlamaForCausalLM", num_hidden_layers=0),
}
WHISPER = {
    "model_type": "whisper",
    "architectures": ["WhisperForConditionalGeneration"],
    "is_encoder_decoder": True,
    "torch_dtype": "float16",
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "vocab_size": 512,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "num_mel_bins": 80,
}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTHONHASHSEED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def reply(line: str, **request: bool) -> dict[str, Any]:
    return doctor_child.examine(shlex.split(line), **request)


@on_vllm
@pytest.mark.parametrize("name", PLAIN)
def test_sizes_from_vllms_configuration_are_those_of_its_engine(name: str, tmp_path: Path) -> None:
    folder = save(tmp_path, PLAIN[name])
    tokens = 16 if "kv_lora_rank" in PLAIN[name] else 32
    found = reply(f"{folder} --block-size {tokens} --skip-tokenizer-init")["sizes"]
    page, block = stock_sizes(folder, tokens, "auto", "auto")
    assert (found["page_bytes"], found["page_bytes"] * found["pages"]) == (page, block)


@on_vllm
@pytest.mark.parametrize(
    ("options", "page", "pages"),
    [
        ("", 2 * 8 * 128 * 2, 36),
        ("-tp 16 -dcp 2", 2 * 128 * 2, 36),  # two ranks share the tokens
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
    found = reply(f"{save(tmp_path, QWEN3_8B)} --block-size 32 {options}")["sizes"]
    tokens = 64 if "-dcp" in options else 32
    assert (found["page_bytes"], found["pages"], found["tokens"]) == (32 * page, pages, tokens)


@on_vllm
@pytest.mark.parametrize("name", OTHERS)
def test_sizes_that_do_not_follow_from_the_configuration_are_unknown(name: str, tmp_path: Path) -> None:
    assert "depend on" in reply(f"{save(tmp_path, OTHERS[name])} --block-size 32")["sizes"]["unknown"]


@on_vllm
def test_a_good_line_has_no_problem(tmp_path: Path) -> None:
    found = reply(f"{save(tmp_path, QWEN3_8B)} {OURS} -tp 2 --max-model-len 8k")
    assert (found["connector"], found["problems"], found["warnings"]) == ("KVOffloadConnector", [], [])
    assert (found["drafts"], found["tier_problems"], found["hash_algorithm"]) == (None, [], "sha256")
    assert found["transfer"] == GOOD
    assert (found["values"]["tensor_parallel_size"], found["values"]["max_model_len"]) == (2, 8000)


@on_vllm
@pytest.mark.parametrize(
    ("line", "key", "said"),
    [
        ("M OURS --bogus", "refused", "unrecognized arguments: --bogus"),
        ("M OURS -tp two", "refused", "invalid int value: 'two'"),
        ("M OURS --max-model-len 1M", "refused", "max_model_len (1048576) is greater"),
        ('M --kv-transfer-config \'{"kv_role": "both"}\'', "refused", "kv_role"),
        ("M OURS --config nowhere.yaml", "refused", "nowhere.yaml"),
        ("M OURS --help", "refused", "asks for help"),
        ("org/model OURS -tp 2", "unknown", "the configuration of org/model is not on this machine"),
        ("s3://bucket/model OURS", "unknown", "s3://bucket/model is not on this machine"),
        ("/mnt/models OURS", "unknown", "/mnt/models is not on this machine"),
        ("org/model:Q4_K_M OURS", "unknown", "is not on this machine"),
        (
            'M OURS -sc \'{"model":"org/draft","num_speculative_tokens":2}\'',
            "unknown",
            "a file of the model is not on",
        ),
        ("M OURS --kv-offloading-size 4", "connector", "OffloadingConnector"),
        ("M OURS --kv_offloading_size=4", "connector", "OffloadingConnector"),
        ("M OURS --no-enable-prefix-caching", "problems", "prefix caching is off"),
        ("M OURS --prefix-caching-hash-algo xxhash", "tier_problems", "set PYTHONHASHSEED"),
        ("M OURS --load-format dummy", "tier_problems", "set weights_id"),
        ("WHISPER OURS", "problems", "the model is an encoder-decoder"),
        ("LFM2 OURS --no-enable-prefix-caching", "problems", "in mode none"),
    ],
)
def test_what_vllm_refuses_replaces_or_lacks_is_in_the_reply(
    line: str, key: str, said: str, tmp_path: Path
) -> None:
    names = {"M": QWEN3_8B, "LFM2": OTHERS["recurrent layers"], "WHISPER": WHISPER}
    for name, config in names.items():
        (folder := tmp_path / name).mkdir()
        line = line.replace(f"{name} ", f"{save(folder, config)} ")
    found = reply(line.replace("OURS", OURS))
    assert said in str(found[key])
    if key == "unknown":
        assert found["transfer"] == GOOD


@on_vllm
@pytest.mark.parametrize(
    ("config", "has_draft"),
    [
        ({"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}, False),
        ({"method": "draft_model", "num_speculative_tokens": 2}, True),
    ],
)
def test_the_kind_of_drafts_is_in_the_reply(config: dict[str, Any], has_draft: bool, tmp_path: Path) -> None:
    folder = save(tmp_path, LLAMA_8B)
    config = config if not has_draft else {**config, "model": str(folder)}
    found = reply(f"{folder} {OURS} --block-size 32 --speculative-config '{json.dumps(config)}'")
    assert found["drafts"] == config["method"]
    assert ("a draft model" in found["sizes"].get("unknown", "")) is has_draft


@on_vllm
def test_options_of_a_program_around_vllm_are_ignored(tmp_path: Path) -> None:
    line = f"--model {save(tmp_path, QWEN3_8B)} --is-prefill-worker --connector none {OURS}"
    assert "unrecognized" in reply(line)["refused"]
    assert reply(line, is_lenient=True)["connector"] == "KVOffloadConnector"


@on_vllm
def test_the_environment_of_the_line_decides(tmp_path: Path) -> None:
    """The doctor's own process is asked as an operator asks it; its child has the line's environment."""
    folder = save(tmp_path, QWEN3_8B)
    command = [sys.executable, "-m", "kvoffload", "doctor", "--json", "--"]
    start = ["PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", "vllm", "serve", str(folder)]
    done = subprocess.run(
        [*command, *start, "--kv-transfer-config", TRANSFER], capture_output=True, text=True, check=False
    )
    found = {one["check"]: one for one in json.loads(done.stdout)["findings"]}["vllm options"]
    assert (done.returncode, found["verdict"]) == (1, "error")
    assert "KV connector KVOffloadConnector is incompatible" in found["finding"]
    assert "--enable-cumem-allocator" in found["remedy"]
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ
