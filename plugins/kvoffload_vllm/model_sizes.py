"""Computes the sizes of vLLM's KV blocks from a model's `config.json`, without importing vLLM, which takes seconds.

A model type is supported only if a test compares its sizes with those of a stock vLLM, because a wrong size is worse
than none. The supported types are models whose layers all have full attention and pages of one size, and DeepSeek's
models with multi-head latent attention. A block has one page in each layer.

A `config.json` may come from anywhere, so each value that is read has a type and bounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from kvoffload.model.config import size_text
from kvoffload.model.errors import ConfigError, KVOffloadError

CACHE_DTYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")

_DTYPES = ("float32", "float16", "half", "bfloat16")

_MLA = "deepseek_v2"
MODEL_TYPES = (_MLA, "llama", "qwen3")
"""The supported model types. A test compares the sizes of each with those of a stock vLLM."""

_DEFAULTS: Mapping[str, Mapping[str, int]] = {"qwen3": {"head_dim": 128, "num_key_value_heads": 32}}
"""Values that the model classes assume when a published `config.json` lacks them."""

_FULL = "full_attention"
_LARGEST_CONFIG = 1 << 20  # bytes
_SHOWN = 40  # how many characters of a text in the file an error quotes

_Layers = Annotated[int, msgspec.Meta(ge=1, le=4096)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


class SizesNotKnown(KVOffloadError):
    """Raised when the sizes of a model cannot be computed here."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that are read from a `config.json`, under the names they have there."""

    model_type: str
    num_hidden_layers: _Layers
    hidden_size: _Count | None = None
    num_attention_heads: _Count | None = None
    num_key_value_heads: _Count | None = None
    head_dim: _Count | None = None
    kv_lora_rank: _Count | None = None
    qk_rope_head_dim: _Count | None = None
    use_sliding_window: bool | None = None
    layer_types: list[str] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    quantization_config: dict[str, object] | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """vLLM's options that the sizes depend on, under vLLM's names."""

    tensor_parallel_size: int = 1
    block_size: int = 16
    kv_cache_dtype: str = "auto"


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes of one rank's KV blocks.

    Args:
        page_bytes: bytes of one block in one layer.
        pages: pages in one block, one for each layer.
        about: describes the calculation, for people.
    """

    page_bytes: int
    pages: int
    about: str

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return self.page_bytes * self.pages


def read_config(folder: Path) -> ModelConfig:
    """Read the `config.json` of a model's folder.

    Raises:
        ConfigError: the file does not exist, cannot be read or is invalid.
        SizesNotKnown: this type of model is not supported.
    """
    path = folder / "config.json" if folder.is_dir() else folder
    try:
        if not path.is_file():  # Reading a pipe or a device might never end.
            raise _wrong(f"{path} is not a regular file")
        with path.open("rb") as file:
            raw = msgspec.json.decode(file.read(_LARGEST_CONFIG), type=dict[str, object])
    except OSError as error:
        raise _wrong(f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _wrong(f"{path} cannot be used: {error}") from error
    return model_of(raw)


def model_of(raw: Mapping[str, object]) -> ModelConfig:
    """Check and convert the content of a `config.json`.

    Raises:
        ConfigError: a value has the wrong type or is out of bounds.
        SizesNotKnown: this type of model is not supported.
    """
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        given = f"model_type {kind[:_SHOWN]!r}" if isinstance(kind, str) else "a model without model_type"
        raise SizesNotKnown(f"sizes of {given} are not computed, only of {', '.join(MODEL_TYPES)}")
    try:
        return msgspec.convert({**_DEFAULTS.get(kind, {}), **raw}, ModelConfig)
    except msgspec.ValidationError as error:
        raise _wrong(f"config.json: {error}") from error


def kv_sizes(model: ModelConfig, options: Options) -> ModelSizes:
    """Return the sizes of a model's KV blocks.

    Raises:
        ConfigError: a value that the sizes depend on is missing or cannot be used.
        SizesNotKnown: the model has layers of an unsupported kind.
    """
    page_bytes, calculation = _page(model, _item_bytes(model, options), options)
    pages = _layers(model)
    block = size_text(page_bytes * pages)
    about = f"pages of {size_text(page_bytes)} ({calculation}), {pages} of them in a block: {block} a block and rank"
    return ModelSizes(page_bytes, pages, about)


def _page(model: ModelConfig, item: int, options: Options) -> tuple[int, str]:
    """Return how many bytes a block takes in one layer, and a text that describes the calculation."""
    tokens = options.block_size
    if model.model_type == _MLA:
        width = _needed(model, "kv_lora_rank") + _needed(model, "qk_rope_head_dim")
        return tokens * width * item, f"{tokens} tokens x {width} (latent and rope) x {item} bytes"
    kv_heads = model.num_key_value_heads or _needed(model, "num_attention_heads")
    heads = max(1, kv_heads // options.tensor_parallel_size)
    dim = model.head_dim or _needed(model, "hidden_size") // _needed(model, "num_attention_heads")
    if not dim:
        raise _wrong("config.json has more num_attention_heads than hidden_size")
    return (
        2 * tokens * heads * dim * item,
        f"2 (K and V) x {tokens} tokens x {heads} KV heads x {dim} x {item} bytes",
    )


def _needed(model: ModelConfig, name: str) -> int:
    value: int | None = getattr(model, name)
    if value is None:
        raise _wrong(f"config.json does not give {name}")
    return value


def _layers(model: ModelConfig) -> int:
    """Return the number of layers; raise an error unless all have full attention."""
    layers = model.num_hidden_layers
    if model.layer_types is not None and len(model.layer_types) != layers:
        raise _wrong(f"config.json has {layers} num_hidden_layers and {len(model.layer_types)} layer_types")
    if other := set(model.layer_types or ()) - {_FULL}:
        raise SizesNotKnown(
            f"sizes of layers of {min(other)[:_SHOWN]!r} are not computed in a model of type {model.model_type}"
        )
    if model.use_sliding_window:
        raise SizesNotKnown(
            f"sizes of sliding windows are not computed in a model of type {model.model_type}"
        )
    return layers


def _item_bytes(model: ModelConfig, options: Options) -> int:
    if options.kv_cache_dtype != "auto":
        return 1 if options.kv_cache_dtype.startswith("fp8") else 2
    quantized = model.quantization_config or {}
    if quantized.get("kv_cache_scheme") or quantized.get("kv_cache_quant_algo"):
        raise _wrong("its quantization chooses the KV cache's dtype: give --kv-cache-dtype")
    name = (model.dtype or model.torch_dtype or "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise _wrong(f"config.json has the dtype {name[:_SHOWN]!r}; known are {', '.join(_DTYPES)}")
    return 2  # on a GPU, vLLM converts float32 to a type of 2 bytes


def _wrong(text: str) -> ConfigError:
    return ConfigError([f"--model: {text}"])
