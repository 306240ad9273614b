"""Bytes of a vLLM's KV blocks from its model's `config.json`, without vLLM, which takes seconds to import.

Only the model types whose sizes a test compares with those of a stock vLLM are computed: layers of full attention with
pages of one size, and DeepSeek's multi-head latent attention. A block has a page of every layer. A wrong size is worse
than none.

The model's files may come from anywhere: what is read of them has types and bounds.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from kvoffload.model.config import size_text
from kvoffload.model.errors import ConfigError, KVOffloadError

CACHE_DTYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")

_BYTES_OF_DTYPE = {"float32": 4, "float16": 2, "half": 2, "bfloat16": 2}
_BYTES_IN_USE = 2  # on a GPU vLLM converts float32

_MLA = "deepseek_v2"
MODEL_TYPES = (_MLA, "llama", "qwen3")
"""A test compares the sizes of each with those of a stock vLLM."""

_DEFAULTS: Mapping[str, Mapping[str, int]] = {"qwen3": {"head_dim": 128, "num_key_value_heads": 32}}
"""What the model classes assume where a published config.json is silent."""

T = TypeVar("T")

_FULL = "full_attention"
_INDEX = "model.safetensors.index.json"
_LARGEST_CONFIG, _LARGEST_INDEX = 1 << 20, 64 << 20  # bytes; an index of 100,000 tensors has ten million
_SHOWN = 40  # characters of a text from the file

_Layers = Annotated[int, msgspec.Meta(ge=1, le=4096)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
_Bytes = Annotated[float, msgspec.Meta(ge=1, le=1 << 53)]  # some tools write 1.6e10


class SizesNotKnown(KVOffloadError):
    """Raised when the sizes of a model are not computed here."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of a `config.json`, by its own names."""

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


class _Metadata(msgspec.Struct):
    total_size: _Bytes


class _WeightsIndex(msgspec.Struct):
    metadata: _Metadata


@dataclass(frozen=True, slots=True)
class Options:
    """Options of vLLM that sizes depend on, by vLLM's own names."""

    tensor_parallel_size: int = 1
    block_size: int = 16
    kv_cache_dtype: str = "auto"


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """One rank's KV blocks.

    Args:
        page_bytes: of one block in one layer.
        pages: pages of a block: the layers of a KV cache group.
        about: how the numbers came about.
        blocks: at most so many fit on a device; None if its memory or the weights are not known.
    """

    page_bytes: int
    pages: int
    about: str
    blocks: int | None = None

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all tensors."""
        return self.page_bytes * self.pages


def estimate(folder: Path, options: Options, device_memory: int | None) -> ModelSizes:
    """Return the sizes of a model's blocks, and how many fit into `device_memory` next to the weights.

    vLLM also needs memory for activations and CUDA graphs, which it measures at its start: the number is an upper bound.

    Raises:
        ConfigError: a file cannot be read, or does not hold what it must.
        SizesNotKnown: sizes of this model are not computed.
    """
    model = read_config(folder)
    sizes = kv_sizes(model, options)
    weights = weight_bytes(folder, model)
    if weights is None or device_memory is None:
        lacks = "without --device-memory" if weights is not None else f"without *.safetensors in {folder}"
        return replace(sizes, about=f"{sizes.about}; {lacks} the device's blocks are not estimated")
    of_rank = weights // options.tensor_parallel_size
    blocks = max(0, device_memory - of_rank) // sizes.block_bytes
    about = (
        f"{sizes.about}; device: {size_text(device_memory)} less {size_text(of_rank)} of weights, and less activations and CUDA "
        f"graphs, which vLLM measures at its start: at most {blocks:,} blocks"
    )
    return replace(sizes, about=about, blocks=blocks)


def read_config(folder: Path) -> ModelConfig:
    """Return what is read of the `config.json` of a model's folder.

    Raises:
        ConfigError: there is none, or it does not hold what it must.
        SizesNotKnown: sizes of this type of model are not computed.
    """
    path = folder / "config.json" if os.path.isdir(folder) else folder
    return model_of(_decode(path, _LARGEST_CONFIG, dict[str, object]))


def model_of(raw: Mapping[str, object]) -> ModelConfig:
    """Return what is read of a `config.json`.

    Raises:
        ConfigError: a value is of the wrong type or out of bounds.
        SizesNotKnown: sizes of this type of model are not computed.
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
        ConfigError: the model's configuration lacks something.
        SizesNotKnown: it has layers whose sizes are not computed.
    """
    page_bytes, calculation = _page(model, _item_bytes(model, options), options)
    pages = _layers(model)
    block = size_text(page_bytes * pages)
    about = f"pages of {size_text(page_bytes)} ({calculation}), {pages} of them in a block: {block} a block and rank"
    return ModelSizes(page_bytes, pages, about)


def weight_bytes(folder: Path, model: ModelConfig) -> int | None:
    """Return the bytes of all weights in the dtype they are used in, None if the folder has none.

    Raises:
        ConfigError: their index cannot be read, or does not hold what it must.
    """
    index = folder / _INDEX
    if os.path.lexists(index):
        stored = int(_decode(index, _LARGEST_INDEX, _WeightsIndex).metadata.total_size)
    else:
        stored = sum(path.stat().st_size for path in folder.glob("*.safetensors") if path.is_file())
    if model.quantization_config is None:
        stored = stored * _BYTES_IN_USE // _stored_item_bytes(model)
    return stored or None


def _decode(path: Path, most: int, kind: type[T]) -> T:
    """Return what a JSON file of at most so many bytes holds."""
    try:
        if not path.is_file():  # a pipe or a device may never end
            raise _wrong(f"{path} is not a regular file")
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise _wrong(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > most:
        raise _wrong(f"{path} is larger than {size_text(most)}")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _wrong(f"{path} cannot be used: {error}") from error


def _page(model: ModelConfig, item: int, options: Options) -> tuple[int, str]:
    """Return the bytes of a block in one layer, and the calculation."""
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
    """Return how many layers have KV; all have full attention."""
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
    _stored_item_bytes(model)
    return _BYTES_IN_USE


def _stored_item_bytes(model: ModelConfig) -> int:
    name = (model.dtype or model.torch_dtype or "float32").removeprefix("torch.")
    if name not in _BYTES_OF_DTYPE:
        raise _wrong(f"config.json has the dtype {name[:_SHOWN]!r}; known are {', '.join(_BYTES_OF_DTYPE)}")
    return _BYTES_OF_DTYPE[name]


def _wrong(text: str) -> ConfigError:
    return ConfigError([f"--model: {text}"])
