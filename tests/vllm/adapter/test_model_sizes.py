"""The sizes of KV blocks that the doctor computes from a model's configuration, and a stock vLLM's sizes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffload.cli.main import main
from kvoffload.model.errors import ConfigError
from kvoffload_vllm.model_sizes import (
    MODEL_TYPES,
    ModelSizes,
    Options,
    SizesNotKnown,
    kv_sizes,
    model_of,
    read_config,
)
from tests.vllm.adapter.stand_ins import on_vllm
from tests.vllm.stock import engines

QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "torch_dtype": "bfloat16",
    "vocab_size": 512,
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "use_sliding_window": False,
    "sliding_window": None,
}
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "float16",
    "vocab_size": 512,
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
# Without head dimension and KV heads, the defaults of the model's class apply.
QWEN3_SILENT = {k: v for k, v in QWEN3_8B.items() if k not in ("head_dim", "num_key_value_heads")}
DEEPSEEK_V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 27,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "max_position_embeddings": 4096,
    "vocab_size": 512,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "v_head_dim": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}


def like_llama(model_type: str, architecture: str, **fields: object) -> dict[str, Any]:
    """Return the configuration of a small model. None in `fields` removes the field."""
    small = {"num_hidden_layers": 4, "intermediate_size": 1024, "vocab_size": 512, **fields}
    whole = {**LLAMA_8B, "model_type": model_type, "architectures": [architecture], **small}
    return {name: value for name, value in whole.items() if value is not None or name == "sliding_window"}


V3 = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "q_lora_rank": 128}
MODELS = {
    "qwen3": QWEN3_8B,
    "llama": LLAMA_8B,
    "qwen3-silent": QWEN3_SILENT,
    "deepseek": DEEPSEEK_V2_LITE,
    "deepseek-v3": {**DEEPSEEK_V2_LITE, **V3},
    "mistral": like_llama("mistral", "MistralForCausalLM", sliding_window=None),
    "mistral-silent": like_llama(
        "mistral", "MistralForCausalLM", num_key_value_heads=None, sliding_window=None
    ),
    "mixtral": like_llama("mixtral", "MixtralForCausalLM", num_local_experts=4, num_key_value_heads=None),
    "qwen2": like_llama("qwen2", "Qwen2ForCausalLM", use_sliding_window=False, sliding_window=4096),
    "qwen2-silent": like_llama("qwen2", "Qwen2ForCausalLM", num_key_value_heads=None, sliding_window=4096),
    "qwen3_moe": like_llama("qwen3_moe", "Qwen3MoeForCausalLM", head_dim=64, **EXPERTS),
    "qwen3_moe-silent": like_llama(
        "qwen3_moe", "Qwen3MoeForCausalLM", num_key_value_heads=None, num_attention_heads=32, **EXPERTS
    ),
}


def sizes(config: dict[str, Any], options: Options) -> ModelSizes:
    return kv_sizes(model_of(config), options)


def test_only_model_types_that_are_compared_with_a_stock_vllm_are_computed() -> None:
    assert {config["model_type"] for config in MODELS.values()} == set(MODEL_TYPES)


@pytest.mark.parametrize(
    ("config", "options", "page", "pages"),
    [
        (QWEN3_8B, Options(), 2 * 16 * 8 * 128 * 2, 36),
        (QWEN3_8B, Options(tensor_parallel_size=2, block_size=32), 2 * 32 * 4 * 128 * 2, 36),
        (QWEN3_8B, Options(tensor_parallel_size=16), 2 * 16 * 1 * 128 * 2, 36),
        (QWEN3_8B, Options(kv_cache_dtype="fp8"), 2 * 16 * 8 * 128, 36),
        (LLAMA_8B, Options(), 2 * 16 * 8 * 128 * 2, 32),
        (QWEN3_8B, Options(pipeline_parallel_size=4), 2 * 16 * 8 * 128 * 2, 9),
        (QWEN3_8B, Options(dtype="float32"), 2 * 16 * 8 * 128 * 4, 36),
        (QWEN3_8B, Options(dtype="float32", kv_cache_dtype="bfloat16"), 2 * 16 * 8 * 128 * 2, 36),
        (DEEPSEEK_V2_LITE, Options(tensor_parallel_size=8, block_size=64), 64 * 576 * 2, 27),
        ({**QWEN3_8B, "torch_dtype": "float32"}, Options(), 2 * 16 * 8 * 128 * 2, 36),
    ],
)
def test_the_sizes_of_known_models(config: dict[str, Any], options: Options, page: int, pages: int) -> None:
    found = sizes(config, options)
    assert (found.page_bytes, found.pages, found.block_bytes) == (page, pages, page * pages)


QUANTIZED = {"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}}


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "qwen3_next", "full_attention_interval": 4},
        {"model_type": "gemma2"},
        {"model_type": "gemma3_text"},
        {"model_type": "kimi_linear", "kv_lora_rank": 512, "linear_attn_config": {"head_dim": 128}},
        {"model_type": "minimax_text_01", "attn_type_list": [0, 0, 0, 1] * 9},
        {"model_type": "glm4_moe_lite", "kv_lora_rank": 512, "qk_rope_head_dim": 64},
        {"model_type": ["qwen3"]},
        {"architectures": ["Qwen3ForSequenceClassification"]},
        {"is_causal": False},
        {**LLAMA_8B, "use_sliding_window": None, "sliding_window": 4096},
        {"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}},
        {"quantization_config": QUANTIZED},
        {"compression_config": {"kv_cache_scheme": {"num_bits": 8}}},
        {"head_dim": 256},
        {"model_type": None, "text_config": QWEN3_8B},
        {"layer_types": ["linear_attention"] * 36},
        {"layer_types": ["sliding_attention"] * 36},
        {"use_sliding_window": True},
    ],
)
def test_sizes_not_compared_with_a_stock_vllm_are_not_computed(change: dict[str, Any]) -> None:
    with pytest.raises(SizesNotKnown):
        sizes({**QWEN3_8B, **change}, Options())


def test_a_window_that_applies_without_a_value_is_not_computed() -> None:
    silent = {name: value for name, value in MODELS["mistral"].items() if name != "sliding_window"}
    with pytest.raises(SizesNotKnown, match="sliding windows"):
        sizes(silent, Options())


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (QWEN3_8B, Options(kv_cache_dtype="nvfp4")),
        (QWEN3_8B, Options(pipeline_parallel_size=5)),
        (QWEN3_8B, Options(pipeline_parallel_size=2)),  # an environment variable divides the layers
        (DEEPSEEK_V2_LITE, Options()),  # the GPU backend chooses this model's block size
    ],
)
def test_options_that_leave_the_sizes_unknown_are_refused(
    config: dict[str, Any], options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    if options.pipeline_parallel_size == 2:
        monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "20,16")
    with pytest.raises(SizesNotKnown):
        sizes(config, options)


@pytest.mark.parametrize(
    ("change", "options", "error", "said"),
    [
        ({"num_hidden_layers": None}, Options(), SizesNotKnown, "num_hidden_layers"),
        (
            {"torch_dtype": "float8_e4m3fn"},
            Options(),
            SizesNotKnown,
            "the dtype 'float8_e4m3fn' is not known",
        ),
        ({}, Options(tensor_parallel_size=3), ConfigError, "8 KV heads, which 3 ranks cannot share"),
    ],
)
def test_sizes_that_do_not_follow_from_the_configuration_are_refused(
    change: dict[str, Any], options: Options, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        sizes({**QWEN3_8B, **change}, options)


def save(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_doctor_uses_the_models_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["doctor", "--json", "--model", str(save(tmp_path, QWEN3_8B)), "--kv-cache-memory-bytes", "3GiB"]
    argv += ["--config", "host_bytes=8GiB"]
    assert main(argv) == 0
    found = {one["check"]: one for one in json.loads(capsys.readouterr().out)["findings"]}
    assert "1,365 blocks fit the KV cache" in found["model sizes"]["finding"]
    assert "3,640 blocks on the host, 1,365 on the device" in found["host pool"]["finding"]
    assert "pages of 64.0 KiB" in found["copy speed"]["finding"]


@pytest.mark.parametrize("content", [json.dumps(QUANTIZED), "not JSON", "[]", "\xff", '{"a":' * 100_000])
def test_a_quantization_in_a_separate_file_is_read(tmp_path: Path, content: str) -> None:
    config = read_config(str(save(tmp_path, QWEN3_8B)))
    (tmp_path / "hf_quant_config.json").write_text(content, encoding="latin-1")
    with pytest.raises(SizesNotKnown, match="give --kv-cache-dtype"):
        kv_sizes(read_config(str(tmp_path)), Options())
    given = Options(kv_cache_dtype="fp8")
    assert kv_sizes(read_config(str(tmp_path)), given) == kv_sizes(config, given)


# -- models in the Hugging Face cache ----------------------------------------------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a cache that has two revisions of one model. As in a real cache, the files of a snapshot are links."""
    repository = tmp_path / "hub" / "models--Qwen--Qwen3-8B"
    for commit, layers in ((COMMIT, 36), ("f" * 40, 9)):
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (repository / "blobs").mkdir(exist_ok=True)
        (repository / "blobs" / commit).write_text(json.dumps({**QWEN3_8B, "num_hidden_layers": layers}))
        (snapshot / "config.json").symlink_to(f"../../blobs/{commit}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    (repository / "refs" / "small").write_text("f" * 40)
    for name in ("HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(repository.parent))
    return repository.parent


REVISIONS = [("main", 36), ("small", 9), (COMMIT, 36), ("f" * 40, 9)]


@pytest.mark.parametrize(("revision", "layers"), REVISIONS)
def test_a_models_id_is_found_in_the_hugging_face_cache(hub: Path, revision: str, layers: int) -> None:
    assert read_config("Qwen/Qwen3-8B", revision).num_hidden_layers == layers


@pytest.mark.parametrize(
    ("name", "value"),
    [("HF_HUB_CACHE", "hub"), ("HF_HOME", "."), ("XDG_CACHE_HOME", ".."), ("HOME", "../..")],
)
def test_the_cache_is_found_where_environment_variables_say(
    name: str, value: str, hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home" / ".cache" / "huggingface"
    home.mkdir(parents=True)
    hub.rename(home / "hub")
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv(name, str((home / value).resolve()))
    assert read_config("Qwen/Qwen3-8B").num_hidden_layers == 36


@pytest.mark.parametrize(
    ("model", "revision"),
    [("Qwen/Qwen3-9B", "main"), ("Qwen/Qwen3-8B", "other"), ("Qwen3-8B", "main"), ("Qwen/Qwen3-8B", "")],
)
def test_the_sizes_of_a_model_that_is_not_in_the_cache_are_unknown(
    hub: Path, model: str, revision: str
) -> None:
    with pytest.raises(SizesNotKnown, match=f"is neither a folder nor, with revision {revision}, in {hub}"):
        read_config(model, revision)


@on_vllm
def test_hugging_face_finds_the_same_file(hub: Path) -> None:
    from huggingface_hub import try_to_load_from_cache

    for revision, _ in REVISIONS:
        found = try_to_load_from_cache("Qwen/Qwen3-8B", "config.json", cache_dir=hub, revision=revision)
        assert read_config("Qwen/Qwen3-8B", revision) == read_config(found)
    assert try_to_load_from_cache("Qwen/Qwen3-8B", "config.json", cache_dir=hub, revision="other") is None


# -- untrusted models ---------------------------------------------------------------------------------------------------

WHOLE = json.dumps(QWEN3_8B).encode()
FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "layers 0": (QWEN3_8B, {"num_hidden_layers": 0}),
    "layers 10^18": (QWEN3_8B, {"num_hidden_layers": 10**18}),
    "layers 10^4000": (QWEN3_8B, {"num_hidden_layers": 10**4000}),
    "layers true": (QWEN3_8B, {"num_hidden_layers": True}),
    "layers 36.5": (QWEN3_8B, {"num_hidden_layers": 36.5}),
    "layers not a number": (QWEN3_8B, {"num_hidden_layers": float("nan")}),
    "heads 0": (LLAMA_8B, {"num_attention_heads": 0}),
    "KV heads -8": (LLAMA_8B, {"num_key_value_heads": -8}),
    "no heads": (LLAMA_8B, {"num_attention_heads": None}),
    "width infinite": (LLAMA_8B, {"hidden_size": float("inf")}),
    "more heads than width": (LLAMA_8B, {"hidden_size": 8}),
    "head_dim a text": (QWEN3_8B, {"head_dim": "128"}),
    "architectures a text": (QWEN3_8B, {"architectures": "Qwen3ForCausalLM"}),
    "layer_types a number": (QWEN3_8B, {"layer_types": 36}),
    "layer_types of numbers": (QWEN3_8B, {"layer_types": [1] * 36}),
    "too few layer_types": (QWEN3_8B, {"layer_types": ["full_attention"]}),
    "quantization_config a text": (QWEN3_8B, {"quantization_config": "fp8"}),
    "dtype a number": (QWEN3_8B, {"dtype": 16}),
    "dtype an escape": (QWEN3_8B, {"torch_dtype": "\x1b]0;title\x07"}),
    "dtype of a million letters": (QWEN3_8B, {"torch_dtype": "f" * 1_000_000}),
    "MLA without rope": (DEEPSEEK_V2_LITE, {"qk_rope_head_dim": None}),
    "MLA without latent": (DEEPSEEK_V2_LITE, {"kv_lora_rank": None}),
    "use_sliding_window a text": (QWEN3_8B, {"use_sliding_window": "no"}),
}
CONTENTS: dict[str, bytes] = {
    "empty": b"",
    "a list": b"[]",
    "words": b"this is not JSON",
    "cut off": WHOLE[:-20],
    "not UTF-8": b'{"model_type": "\xff"}',
    "zeros": bytes(4096),
    "nested": b'{"a":' * 100_000,
    "huge": b" " * (16 << 20) + WHOLE,
}


def _link_folder(path: Path) -> None:
    path.parent.rmdir()
    path.parent.symlink_to(path.parent)


def _make_pipe_beside(path: Path) -> None:
    path.write_bytes(WHOLE)
    os.mkfifo(path.with_name("hf_quant_config.json"))


SPECIAL: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path),
    "a link to nowhere": lambda path: path.symlink_to("nowhere"),
    "unreadable, by root too": lambda path: path.symlink_to("/proc/self/mem"),
    "missing": lambda path: None,
    "no folder": lambda path: path.parent.rmdir(),
    "a folder that is a link to itself": _link_folder,
    "a pipe beside it": _make_pipe_beside,
}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read any file")
def test_a_model_file_of_another_user_leaves_the_sizes_unknown(tmp_path: Path) -> None:
    (save(tmp_path, QWEN3_8B) / "config.json").chmod(0)
    with pytest.raises(SizesNotKnown, match=r"config\.json cannot be read: Permission denied"):
        read_config(str(tmp_path))


def sizes_by_the_doctor(capsys: pytest.CaptureFixture[str], model: str) -> tuple[dict[str, Any], str]:
    """Return the doctor's finding about a model's sizes, and its whole output as text."""
    argv = ["doctor", "--block-size", "16", "--config", "host_bytes=1MiB", "--model", model]
    assert main([*argv, "--json"]) == 0
    found = {one["check"]: one for one in json.loads(capsys.readouterr().out)["findings"]}
    assert found["host memory"]["verdict"] != "unknown"
    assert main(argv) == 0
    return found["model sizes"], capsys.readouterr().out


@pytest.mark.parametrize("name", [*FIELDS, *CONTENTS, *SPECIAL])
def test_a_hostile_model_file_costs_the_sizes_and_no_other_check(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    if name in FIELDS:
        config, fields = FIELDS[name]
        save(folder, {**config, **fields})
    elif name in CONTENTS:
        (folder / "config.json").write_bytes(CONTENTS[name])
    else:
        SPECIAL[name](folder / "config.json")
    sizes, out = sizes_by_the_doctor(capsys, str(folder))
    assert sizes["verdict"] == "unknown"
    assert len(sizes["finding"]) < 600
    assert out.replace("\n", "").isprintable()


@pytest.mark.parametrize(
    "model",
    [
        *("s3://bucket/coder", "gs://bucket/model", "hf://org/model", "/models/weights", "/mnt/models", "."),
        *("unsloth/Some-GGUF:Q4_K_M", "org/model", "model.gguf", "", "../..", "a" * 5000, "a\0b", "$MODEL"),
    ],
)
def test_a_model_that_is_not_here_costs_the_sizes_and_no_other_check(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sizes_by_the_doctor(capsys, model)[0]["verdict"] == "unknown"


@pytest.mark.parametrize("number", ["Infinity", "-Infinity", "NaN"])
def test_sizes_are_computed_beside_numbers_that_json_lacks_and_in_large_files(
    number: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = json.dumps({str(one): f"label {one}" for one in range(130_000)})
    text = json.dumps(LLAMA_8B)[:-1] + f', "limit": [0.0, {number}], "id2label": {labels}}}'
    assert len(text) > 3_000_000
    (tmp_path / "config.json").write_text(text)
    assert "32 of them in a block" in sizes_by_the_doctor(capsys, str(tmp_path))[0]["finding"]


@pytest.mark.parametrize(
    "config", [{**QWEN3_8B, "model_type": "\x1b[2J"}, {"text_config": "x"}, {"text_config": [1]}]
)
def test_a_model_of_an_unsupported_type_has_unknown_sizes(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["doctor", "--config", "host_bytes=1MiB", "--model", str(save(tmp_path, config))]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "model sizes (sizes of " in " ".join(out.split())
    assert "give --block-bytes and --device-blocks" in " ".join(out.split())
    assert "\x1b" not in out
    main([*argv, "--verbose", "--block-bytes", "1MiB", "--device-blocks", "1000"])
    assert "ok model sizes: given as vLLM's start logs them" in " ".join(capsys.readouterr().out.split())


# -- a stock vLLM -------------------------------------------------------------------------------------------------------


def stock_sizes(folder: Path, block_size: int, cache_dtype: str, dtype: str) -> tuple[int, int]:
    """Return the bytes of a page and of a block of a model that vLLM makes without weights."""
    import torch
    from vllm import distributed
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    options: dict[str, Any] = {"block_size": block_size, "kv_cache_dtype": cache_dtype, "dtype": dtype}
    options |= {"skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 1024}
    config: Any = EngineArgs(str(folder), **options).create_engine_config()
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(1, 0, (folder / "rendezvous").as_uri(), 0, "gloo")
        parallel_state.ensure_model_parallel_initialized(1, 1)
        try:
            with torch.device("meta"), set_default_torch_dtype(config.model_config.dtype):
                initialize_model(config)
            layers = config.compilation_config.static_forward_context
            caches = {name: layer for name, layer in layers.items() if hasattr(layer, "get_kv_cache_spec")}
            found = {name: layer.get_kv_cache_spec(config) for name, layer in caches.items()}
            specs = {name: spec for name, spec in found.items() if spec is not None}
        except ValueError as refused:
            if "--kv-cache-dtype" not in str(refused):
                raise
            pytest.skip(str(refused))  # vLLM 0.33 refuses fp8 caches on some CPUs
        finally:
            distributed.cleanup_dist_env_and_memory()
    config.cache_config.kv_cache_layout = "LBNHC"  # an engine would receive this layout from its workers
    planning = engines.cache_planning()
    groups = planning.get_kv_cache_groups(config, specs)
    (page,) = {spec.page_size_bytes for spec in specs.values()}
    sum_up = planning._get_kv_cache_bytes_per_block
    if len(signature(sum_up).parameters) == 1:  # before vLLM 0.32
        return page, sum_up(groups)
    return page, sum_up(groups, config.cache_config.get_resolved_kv_cache_layout())


@on_vllm
@pytest.mark.parametrize(
    ("model", "cache_dtype", "dtype"),
    [
        *((model, cache, "auto") for model in MODELS for cache in ("auto", "fp8")),
        ("qwen3", "auto", "float32"),
    ],
)
def test_the_sizes_equal_those_of_a_stock_vllm(
    model: str, cache_dtype: str, dtype: str, tmp_path: Path
) -> None:
    tokens = 16 if "kv_lora_rank" in MODELS[model] else 32  # vLLM's CPU backends accept these block sizes
    found = sizes(MODELS[model], Options(block_size=tokens, kv_cache_dtype=cache_dtype, dtype=dtype))
    stock = stock_sizes(save(tmp_path, MODELS[model]), tokens, cache_dtype, dtype)
    assert (found.page_bytes, found.block_bytes) == stock


@on_vllm
@pytest.mark.parametrize("model", MODELS)
def test_heads_are_divided_between_ranks_as_in_a_stock_vllm(model: str, tmp_path: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs

    folder = save(tmp_path, MODELS[model])
    config: Any = EngineArgs(str(folder), skip_tokenizer_init=True).create_model_config()
    whole = sizes(MODELS[model], Options(block_size=16)).page_bytes
    heads = config.get_num_kv_heads(SimpleNamespace(tensor_parallel_size=1))
    for ranks in (1, 2, 8, 32):
        share = sizes(MODELS[model], Options(tensor_parallel_size=ranks, block_size=16)).page_bytes
        assert share * heads == whole * config.get_num_kv_heads(SimpleNamespace(tensor_parallel_size=ranks))


@on_vllm
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 12])
def test_layers_are_divided_between_stages_as_in_a_stock_vllm(stages: int) -> None:
    from vllm.distributed.utils import get_pp_indices

    layers = sizes(QWEN3_8B, Options(pipeline_parallel_size=stages)).pages
    ends = [get_pp_indices(36, stage, stages) for stage in range(stages)]
    assert ends == [(stage * layers, (stage + 1) * layers) for stage in range(stages)]
