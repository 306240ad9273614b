"""Computes the sizes of vLLM's KV blocks from a model's `config.json`, without importing vLLM, which takes seconds.

A model type is supported only if a test compares the computed sizes to the sizes in a stock vLLM. In all supported
models, every layer has full attention or multi-head latent attention, and all pages have the same size. A block has one
page in each layer.

The file is in the model's folder or in the Hugging Face cache; nothing is downloaded. Because the file may come from
anywhere, the type and bounds of each value are checked.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec

from kvoffload.checks.model_file import ModelUnread, read_model_file
from kvoffload.model.config import size_text
from kvoffload.model.errors import ConfigError, KVOffloadError

CACHE_DTYPES = {"float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""The bytes of a value in a KV cache, by the dtypes that `--kv-cache-dtype` can name."""
_DTYPES = {"auto": 2, "half": 2, "float16": 2, "bfloat16": 2, "float": 4, "float32": 4}

_MLA = {"deepseek_v2": "DeepseekV2ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}
MODEL_TYPES = {
    **_MLA,
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
"""The supported model types, each with its class in vLLM.

For each of them, a test compares the computed sizes with those of a stock vLLM.
"""

_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32, "use_sliding_window": False},
    "qwen3": {"head_dim": 128, "num_key_value_heads": 32},
    "qwen3_moe": {"num_key_value_heads": 4, "use_sliding_window": False},
}
"""Values that vLLM's model classes use if a `config.json` does not contain them."""

_FULL = "full_attention"
_SHOWN = 40  # the maximum number of characters that an error message quotes from `config.json`
_BLOCK_TOKENS = 16  # vLLM's default block size
LARGEST_HEAD = 192
"""For larger heads, vLLM may choose larger blocks."""

_Layers = Annotated[int, msgspec.Meta(ge=1, le=4096)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


class SizesNotKnown(KVOffloadError):
    """Raised if kvoffload cannot compute the sizes of a model's KV blocks, for whatever reason."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a model's `config.json` that determine the sizes of KV blocks."""

    model_type: str
    num_hidden_layers: _Layers
    hidden_size: _Count | None = None
    num_attention_heads: _Count | None = None
    num_key_value_heads: _Count | None = None
    head_dim: _Count | None = None
    kv_lora_rank: _Count | None = None
    qk_rope_head_dim: _Count | None = None
    use_sliding_window: bool | None = None
    sliding_window: int | None = None
    is_causal: bool | None = None
    architectures: list[str] | None = None
    layer_types: list[str] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    quantization_config: dict[str, object] | None = None
    compression_config: dict[str, object] | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """The vLLM options that determine the sizes of KV blocks. None means vLLM's default."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    block_size: int | None = None
    kv_cache_dtype: str | None = None
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes of one rank's KV blocks.

    Args:
        page_bytes: the bytes of one block in one layer.
        pages: the number of pages in a block, which is the number of layers on a rank.
        tokens: the number of tokens in a block.
        about: a description of the calculation, for the doctor's output.
        replicas: how many ranks of tensor parallelism have the same KV.
    """

    page_bytes: int
    pages: int
    tokens: int
    about: str
    replicas: int = 1

    @property
    def block_bytes(self) -> int:
        """The bytes of one block in all layers of a rank."""
        return self.page_bytes * self.pages


def read_config(model: str, revision: str = "main", environ: Mapping[str, str] = os.environ) -> ModelConfig:
    """Read the `config.json` of a model.

    Args:
        model: the model's folder, the path of the `config.json`, or the id of a model in the Hugging Face cache.
        revision: the branch, tag or commit to read from the cache.
        environ: the environment variables that say where the cache is.

    Raises:
        SizesNotKnown: the file is not on this machine, cannot be read or is invalid, or the model's type is not
            supported.
    """
    try:
        return model_of(read_model_file(model, revision, environ))
    except ModelUnread as error:
        raise SizesNotKnown(str(error)) from error


def model_of(raw: Mapping[str, object]) -> ModelConfig:
    """Validate the content of a `config.json`.

    Raises:
        SizesNotKnown: the model's type is not supported, or a value has the wrong type or is out of bounds.
    """
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        given = f"model_type {kind[:_SHOWN]!r}" if isinstance(kind, str) else "a model without model_type"
        raise SizesNotKnown(f"sizes of {given} are not computed, only of {', '.join(MODEL_TYPES)}")
    try:
        return msgspec.convert({**_DEFAULTS.get(kind, {}), **raw}, ModelConfig)
    except (msgspec.ValidationError, OverflowError) as error:
        raise SizesNotKnown(f"config.json: {error}") from error


def kv_sizes(model: ModelConfig, options: Options) -> ModelSizes:
    """Return the sizes of a model's KV blocks.

    Raises:
        ConfigError: the ranks cannot share the model's KV heads, so vLLM would refuse to start.
        SizesNotKnown: the sizes depend on more than the given values, or a value is missing or cannot be used.
    """
    tokens = options.block_size or _BLOCK_TOKENS
    token_bytes, calculation = _token(model, _item_bytes(model, options), options)
    pages, page_bytes = _layers(model, options), tokens * token_bytes
    usual = "" if options.block_size else ", unless vLLM's start logs another block size"
    about = f"{calculation} x {tokens} tokens{usual}"
    return sizes_of(page_bytes, pages, tokens, about, _replicas(model, options.tensor_parallel_size))


def sizes_of(page_bytes: int, pages: int, tokens: int, calculation: str, replicas: int = 1) -> ModelSizes:
    """Return the sizes of blocks of `pages` pages, with a description that contains the calculation of a page's bytes."""
    block = f"pages of {size_text(page_bytes)}, {pages} of them in a block: {size_text(page_bytes * pages)} a block and rank"
    return ModelSizes(page_bytes, pages, tokens, f"{block} ({calculation})", replicas)


def _replicas(model: ModelConfig, ranks: int) -> int:
    heads = 1 if model.model_type in _MLA else _kv_heads(model)
    return 1 if ranks % heads else ranks // heads


def _kv_heads(model: ModelConfig) -> int:
    return model.num_key_value_heads or _needed(model, "num_attention_heads")


def _token(model: ModelConfig, item: int, options: Options) -> tuple[int, str]:
    """Return the bytes of one token in one layer, and a description of the calculation."""
    if model.model_type in _MLA:
        width = _needed(model, "kv_lora_rank") + _needed(model, "qk_rope_head_dim")
        _check_block(options, is_usual=False)
        return width * item, f"{width} (latent and rope) x {item} bytes"
    kv_heads = _kv_heads(model)
    ranks = options.tensor_parallel_size
    if kv_heads % ranks and ranks % kv_heads:
        raise ConfigError([f"--model: config.json has {kv_heads} KV heads, which {ranks} ranks cannot share"])
    heads = max(1, kv_heads // ranks)
    dim = model.head_dim or _needed(model, "hidden_size") // _needed(model, "num_attention_heads")
    if not dim:
        raise SizesNotKnown("config.json has more num_attention_heads than hidden_size")
    _check_block(options, is_usual=dim <= LARGEST_HEAD)
    return 2 * heads * dim * item, f"2 (K and V) x {heads} KV heads x {dim} x {item} bytes"


def _check_block(options: Options, *, is_usual: bool) -> None:
    """Raise an error if no block size is given and vLLM may choose a size other than its default."""
    if options.block_size is None and not is_usual:
        raise SizesNotKnown("vLLM chooses the block size by the GPU: give --block-size, which its start logs")


def _needed(model: ModelConfig, name: str) -> int:
    value: int | None = getattr(model, name)
    if value is None:
        raise SizesNotKnown(f"config.json does not give {name}")
    return value


def _layers(model: ModelConfig, options: Options) -> int:
    """Return the number of layers on a rank. Raise an error if a layer does not have full attention."""
    layers, kind, stages = model.num_hidden_layers, model.model_type, options.pipeline_parallel_size
    if model.layer_types is not None and len(model.layer_types) != layers:
        raise SizesNotKnown(
            f"config.json has {layers} num_hidden_layers and {len(model.layer_types)} layer_types"
        )
    if other := set(model.layer_types or ()) - {_FULL}:
        raise SizesNotKnown(f"sizes of {min(other)[:_SHOWN]!r} in a model of type {kind} are not computed")
    if model.use_sliding_window or (model.sliding_window and model.use_sliding_window is None):
        raise SizesNotKnown(f"sizes of sliding windows are not computed in a model of type {kind}")
    if model.architectures not in (None, [MODEL_TYPES[kind]]) or model.is_causal is False:
        raise SizesNotKnown(f"sizes of a model of type {kind} are computed only for {MODEL_TYPES[kind]}")
    if layers % stages or os.environ.get("VLLM_PP_LAYER_PARTITION"):
        raise SizesNotKnown(f"the {stages} pipeline stages have different numbers of the {layers} layers")
    return layers // stages


def _item_bytes(model: ModelConfig, options: Options) -> int:
    if options.kv_cache_dtype in CACHE_DTYPES:
        return CACHE_DTYPES[options.kv_cache_dtype]
    if options.kv_cache_dtype not in (None, "auto"):
        raise SizesNotKnown(f"sizes of KV of dtype {options.kv_cache_dtype!r:.40} are not computed")
    if _chooses_dtype(model.quantization_config) or _chooses_dtype(model.compression_config):
        raise SizesNotKnown("the model's quantization may choose the KV cache's dtype: give --kv-cache-dtype")
    asked, own = options.dtype or "auto", model.dtype or model.torch_dtype or "auto"
    for name in (asked, own.removeprefix("torch.")):
        if name not in _DTYPES:
            raise SizesNotKnown(f"the dtype {name[:_SHOWN]!r} is not known; known are {', '.join(_DTYPES)}")
    return _DTYPES[asked]  # with "auto", vLLM converts float32 to a type of 2 bytes


def _chooses_dtype(quantization: object) -> bool:
    """Return whether a quantization configuration, or an object nested in it, sets the KV cache's dtype."""
    return isinstance(quantization, dict) and any(
        ("kv_cache" in name and value) or _chooses_dtype(value) for name, value in quantization.items()
    )
