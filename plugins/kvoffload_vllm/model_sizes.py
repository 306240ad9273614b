"""Bytes of a vLLM's KV blocks from its model's `config.json`, without vLLM, which takes seconds to import.

Only what follows from the file is computed: layers of full and sliding-window attention with pages of one size, and
DeepSeek's multi-head latent attention. Everything else is refused with its name, because a wrong size is worse than
none. vLLM puts equally many layers into each of its KV cache groups, and a block holds one page of each layer of a group:

    one kind of layer         one group: a block has a page of every layer
    10 full, 52 sliding       groups of 10 layers: a block has 10 pages
    12 full, 13 sliding       groups of 13 layers, because 13 is less than 1.5 times 12
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvoffload.checks.json_option import read_object
from kvoffload.model.config import size_text
from kvoffload.model.errors import ConfigError

FULL, SLIDING = "full_attention", "sliding_attention"

_BYTES_OF_DTYPE = {"float32": 4, "float16": 2, "half": 2, "bfloat16": 2}
_BYTES_OF_CACHE_DTYPE = {"float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
CACHE_DTYPES = ("auto", *_BYTES_OF_CACHE_DTYPE)
DTYPES = ("auto", *_BYTES_OF_DTYPE)

_MLA_TYPES = {"deepseek_v2", "deepseek_v3", "kimi_k2"}
_KV_HEADS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num")
_REFUSED = {
    "index_topk": "sparse attention",
    "compress_ratios": "compressed attention",
    "num_kv_shared_layers": "layers that share KV",
    "layers_block_type": "recurrent layers",
    "hybrid_override_pattern": "recurrent layers",
    "linear_attention": "recurrent layers",
    "ssm_cfg": "recurrent layers",
    "mamba_d_state": "recurrent layers",
    "attention_chunk_size": "chunked attention",
    "is_encoder_decoder": "an encoder",
}
# What the model classes assume where a published config.json is silent.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "num_hidden_layers": 26,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    }
}
_MOST_PADDING = 1.5  # a group is as large as the larger kind of layer below this ratio of the two


@dataclass(frozen=True, slots=True)
class Options:
    """Options of vLLM that sizes depend on, by vLLM's own names."""

    tensor_parallel_size: int = 1
    block_size: int = 16
    kv_cache_dtype: str = "auto"
    dtype: str = "auto"


@dataclass(frozen=True, slots=True)
class KVSizes:
    """One rank's KV blocks.

    Args:
        page_bytes: of one block in one layer.
        pages: pages of a block: the layers of a KV cache group.
        full_groups: groups of full attention, which keep blocks of all tokens.
        block_tokens: tokens of a block.
        about: how the bytes of a page came about.
    """

    page_bytes: int
    pages: int
    full_groups: int
    block_tokens: int
    about: str

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all tensors."""
        return self.page_bytes * self.pages


@dataclass(frozen=True, slots=True)
class Estimate:
    """The sizes of a model's blocks, and how many fit on a device.

    Args:
        kv: the sizes.
        blocks: at most so many blocks fit; None if the device's memory or the weights are not known.
        about: how the number came about.
    """

    kv: KVSizes
    blocks: int | None = None
    about: str = ""


def estimate(folder: Path, options: Options, device_memory: int | None, share: float) -> Estimate:
    """Return the sizes of a model's blocks, and how many fit on a device next to the weights.

    vLLM also needs memory for activations and CUDA graphs, which it measures at its start: the number is an upper bound.

    Raises:
        ConfigError: the configuration cannot be read, or the sizes do not follow from it.
    """
    config = read_config(folder)
    kv = kv_sizes(config, options)
    weights = weight_bytes(folder, config, options)
    if device_memory is None or weights is None:
        return Estimate(kv)
    of_rank = weights // options.tensor_parallel_size
    left = max(0, int(device_memory * share) - of_rank)
    about = (
        f"{share:g} x {size_text(device_memory)} - {size_text(of_rank)} of weights = {size_text(left)}, less activations and "
        "CUDA graphs, which vLLM measures at its start"
    )
    return Estimate(kv, left // kv.block_bytes, about)


def read_config(folder: Path) -> dict[str, Any]:
    """Return the `config.json` of a model's folder.

    Raises:
        ConfigError: there is none.
    """
    path = folder / "config.json" if folder.is_dir() else folder
    return read_object(str(path.absolute()), "--model")


def kv_sizes(config: Mapping[str, Any], options: Options) -> KVSizes:
    """Return the sizes of a model's KV blocks.

    Raises:
        ConfigError: they do not follow from the model's configuration.
    """
    text = _text_config(config)
    for key, what in _REFUSED.items():
        if text.get(key) or config.get(key):
            raise ConfigError(
                [f"--model has {what} ({key}): give --block-bytes, which vLLM prints at its start"]
            )
    numbers, words = _page(text, _item_bytes(config, text, options), options)
    kinds = _kinds(text)
    pages = _group_size(list(kinds.values()))
    return KVSizes(
        page_bytes=numbers,
        pages=pages,
        full_groups=-(-kinds[FULL] // pages),
        block_tokens=options.block_size,
        about=words,
    )


def weight_bytes(folder: Path, config: Mapping[str, Any], options: Options) -> int | None:
    """Return the bytes of all weights in the dtype they are used in, None if the folder has none."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        stored = int(json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"])
    else:
        stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if "quantization_config" in config or not stored:
        return stored or None
    text = _text_config(config)
    return (
        stored
        * _BYTES_OF_DTYPE[_dtype(config, text, options)]
        // _BYTES_OF_DTYPE[_stored_dtype(config, text)]
    )


def _text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    text = config.get("text_config") or config
    kind = text.get("model_type") or ""
    if not kind and str(config.get("model_type")) == "gemma3":
        kind = "gemma3_text"
    return {**_DEFAULTS.get(kind, {}), **text}


def _page(text: Mapping[str, Any], item: int, options: Options) -> tuple[int, str]:
    """Return the bytes of a block in one layer, and the calculation."""
    tokens = options.block_size
    if text.get("model_type") in _MLA_TYPES and text.get("kv_lora_rank"):
        width = text["kv_lora_rank"] + text["qk_rope_head_dim"]
        return tokens * width * item, f"{tokens} tokens x {width} (latent and rope) x {item} bytes"
    heads = max(1, _kv_heads(text) // options.tensor_parallel_size)
    dim = text.get("head_dim") or _needed(text, "hidden_size") // _needed(text, "num_attention_heads")
    return (
        2 * tokens * heads * dim * item,
        f"2 (K and V) x {tokens} tokens x {heads} KV heads x {dim} x {item} bytes",
    )


def _kv_heads(text: Mapping[str, Any]) -> int:
    found = next((text[name] for name in _KV_HEADS if text.get(name)), None)
    heads = found if found is not None else _needed(text, "num_attention_heads")
    if not isinstance(heads, int):
        raise ConfigError(["--model has layers with different numbers of KV heads: give --block-bytes"])
    return heads


def _needed(text: Mapping[str, Any], name: str) -> int:
    if not isinstance(text.get(name), int):
        raise ConfigError(
            [f"--model: config.json does not give {name}: give --block-bytes, which vLLM prints"]
        )
    return int(text[name])


def _kinds(text: Mapping[str, Any]) -> Counter[str]:
    """Return how many layers there are of each kind."""
    layers = _needed(text, "num_hidden_layers")
    if text.get("layer_types"):
        kinds = Counter(text["layer_types"][:layers])
    elif text.get("sliding_window") and text.get("sliding_window_pattern"):
        full = layers // text["sliding_window_pattern"]
        kinds = Counter({FULL: full, SLIDING: layers - full})
    else:
        kinds = Counter({FULL: layers})
    if other := kinds.keys() - {FULL, SLIDING}:
        raise ConfigError([f"--model has layers of {', '.join(sorted(other))}: give --block-bytes"])
    return +kinds


def _group_size(counts: list[int]) -> int:
    least, most = min(counts), max(counts)
    return most if most < least * _MOST_PADDING else least


def _item_bytes(config: Mapping[str, Any], text: Mapping[str, Any], options: Options) -> int:
    if options.kv_cache_dtype != "auto":
        return _BYTES_OF_CACHE_DTYPE[options.kv_cache_dtype]
    quantized = config.get("quantization_config") or {}
    if quantized.get("kv_cache_scheme") or quantized.get("kv_cache_quant_algo"):
        raise ConfigError(["--model chooses the KV cache's dtype by its quantization: give --kv-cache-dtype"])
    return _BYTES_OF_DTYPE[_dtype(config, text, options)]


def _dtype(config: Mapping[str, Any], text: Mapping[str, Any], options: Options) -> str:
    if options.dtype != "auto":
        return options.dtype
    stored = _stored_dtype(config, text)
    return "bfloat16" if stored == "float32" else stored  # as vLLM does on a GPU


def _stored_dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    names = (one.get(key) for one in (config, text) for key in ("dtype", "torch_dtype"))
    name = next((str(name) for name in names if name), "float32").removeprefix("torch.")
    if name not in _BYTES_OF_DTYPE:
        raise ConfigError([f"--model has the dtype {name}: give --dtype and --kv-cache-dtype"])
    return name
