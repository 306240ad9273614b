"""Bytes of a vLLM's KV blocks from its model's `config.json`, without vLLM, which takes seconds to import.

Only the model types whose sizes a test compares with those of a stock vLLM are computed: layers of full and sliding-window
attention with pages of one size, and DeepSeek's multi-head latent attention. A wrong size is worse than none. vLLM puts
equally many layers into each of its KV cache groups, and a block holds one page of each layer of a group:

    one kind of layer         one group: a block has a page of every layer
    10 full, 52 sliding       groups of 10 layers: a block has 10 pages
    12 full, 13 sliding       groups of 13 layers, because 13 is less than 1.5 times 12

The model's files may come from anywhere: what is read of them has types and bounds.
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from kvoffload.model.config import size_text
from kvoffload.model.errors import ConfigError, KVOffloadError

FULL, SLIDING = "full_attention", "sliding_attention"

_BYTES_OF_DTYPE = {"float32": 4, "float16": 2, "half": 2, "bfloat16": 2}
_BYTES_OF_CACHE_DTYPE = {"float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
CACHE_DTYPES = ("auto", *_BYTES_OF_CACHE_DTYPE)
DTYPES = ("auto", *_BYTES_OF_DTYPE)

_MLA, _GEMMA = "deepseek_v2", "gemma3_text"
MODEL_TYPES = (_MLA, _GEMMA, "llama", "qwen3")
"""A test compares the sizes of each with those of a stock vLLM."""

# What the model classes assume where a published config.json is silent.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    _GEMMA: {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "num_hidden_layers": 26,
        "sliding_window_pattern": 6,
    },
    "qwen3": {"head_dim": 128, "num_key_value_heads": 32},
}
_MOST_PADDING = 1.5  # a group is as large as the larger kind of layer below this ratio of the two
_INDEX = "model.safetensors.index.json"
_LARGEST_CONFIG, _LARGEST_INDEX = (
    1 << 20,
    64 << 20,
)  # bytes; an index of a hundred thousand tensors has ten million
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
    sliding_window_pattern: _Count | None = None
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
        ConfigError: a file cannot be read, or does not hold what it must.
        SizesNotKnown: sizes of this model are not computed.
    """
    model = read_config(folder)
    kv = kv_sizes(model, options)
    weights = weight_bytes(folder, model, options)
    if device_memory is None or weights is None:
        return Estimate(kv)
    of_rank = weights // options.tensor_parallel_size
    left = max(0, int(device_memory * share) - of_rank)
    about = (
        f"{share:g} x {size_text(device_memory)} - {size_text(of_rank)} of weights = {size_text(left)}, less activations and "
        "CUDA graphs, which vLLM measures at its start"
    )
    return Estimate(kv, left // kv.block_bytes, about)


def read_config(folder: Path) -> ModelConfig:
    """Return what is read of the `config.json` of a model's folder.

    Raises:
        ConfigError: there is none, or it does not hold what it must.
        SizesNotKnown: sizes of this type of model are not computed.
    """
    path = folder / "config.json" if os.path.isdir(folder) else folder
    try:
        raw = json.loads(_read(path, _LARGEST_CONFIG).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError([f"--model: {path} is not JSON: {error}"]) from error
    if not isinstance(raw, dict):
        raise ConfigError([f"--model: {path} does not hold a JSON object"])
    return model_of(raw)


def model_of(raw: Mapping[str, object]) -> ModelConfig:
    """Return what is read of a `config.json`.

    Raises:
        ConfigError: a value is of the wrong type or out of bounds.
        SizesNotKnown: sizes of this type of model are not computed.
    """
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        given = f"model_type {kind[:_SHOWN]!r}" if isinstance(kind, str) else "a model without model_type"
        raise SizesNotKnown(f"of {given}: sizes are computed only for {', '.join(MODEL_TYPES)}")
    try:
        return msgspec.convert({**_DEFAULTS.get(kind, {}), **raw}, ModelConfig)
    except msgspec.ValidationError as error:
        raise ConfigError([f"--model: config.json: {error}"]) from error


def kv_sizes(model: ModelConfig, options: Options) -> KVSizes:
    """Return the sizes of a model's KV blocks.

    Raises:
        ConfigError: the model's configuration lacks something.
        SizesNotKnown: it has layers whose sizes are not computed.
    """
    page_bytes, words = _page(model, _item_bytes(model, options), options)
    kinds = _kinds(model)
    pages = _group_size(list(kinds.values()))
    return KVSizes(
        page_bytes=page_bytes,
        pages=pages,
        full_groups=-(-kinds[FULL] // pages),
        block_tokens=options.block_size,
        about=words,
    )


def weight_bytes(folder: Path, model: ModelConfig, options: Options) -> int | None:
    """Return the bytes of all weights in the dtype they are used in, None if the folder has none.

    Raises:
        ConfigError: their index cannot be read, or does not hold what it must.
    """
    index = folder / _INDEX
    if os.path.lexists(index):
        stored = _indexed_bytes(index)
    else:
        stored = sum(path.stat().st_size for path in folder.glob("*.safetensors") if path.is_file())
    if model.quantization_config is not None or not stored:
        return stored or None
    return stored * _BYTES_OF_DTYPE[_dtype(model, options)] // _BYTES_OF_DTYPE[_stored_dtype(model)]


def _indexed_bytes(path: Path) -> int:
    try:
        return int(msgspec.json.decode(_read(path, _LARGEST_INDEX), type=_WeightsIndex).metadata.total_size)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigError([f"--model: {path} is no index of weights: {error}"]) from error


def _read(path: Path, most: int) -> bytes:
    """Return a regular file's bytes. Anything else may never end."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(0, "it is not a regular file")
            with open(descriptor, "rb", closefd=False) as file:
                data = file.read(most + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ConfigError([f"--model: {path} cannot be read: {error.strerror or error}"]) from error
    if len(data) > most:
        raise ConfigError([f"--model: {path} is larger than {size_text(most)}"])
    return data


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
        raise ConfigError(["--model: config.json has more num_attention_heads than hidden_size"])
    return (
        2 * tokens * heads * dim * item,
        f"2 (K and V) x {tokens} tokens x {heads} KV heads x {dim} x {item} bytes",
    )


def _needed(model: ModelConfig, name: str) -> int:
    value: int | None = getattr(model, name)
    if value is None:
        raise ConfigError([f"--model: config.json does not give {name}"])
    return value


def _kinds(model: ModelConfig) -> Counter[str]:
    """Return how many layers there are of each kind."""
    layers, kinds = model.num_hidden_layers, Counter(model.layer_types or ())
    has_windows = model.model_type == _GEMMA
    if kinds:
        if other := kinds.keys() - ({FULL, SLIDING} if has_windows else {FULL}):
            raise SizesNotKnown(f"of layers of {min(other)[:_SHOWN]!r} in a model of type {model.model_type}")
        if kinds.total() != layers:
            raise ConfigError(
                [f"--model: config.json has {layers} num_hidden_layers and {kinds.total()} layer_types"]
            )
        return kinds
    if has_windows and model.sliding_window_pattern:
        full = layers // model.sliding_window_pattern
        return +Counter({FULL: full, SLIDING: layers - full})
    if model.use_sliding_window:
        raise SizesNotKnown(f"of sliding windows in a model of type {model.model_type}")
    return Counter({FULL: layers})


def _group_size(counts: list[int]) -> int:
    least, most = min(counts), max(counts)
    return most if most < least * _MOST_PADDING else least


def _item_bytes(model: ModelConfig, options: Options) -> int:
    if options.kv_cache_dtype != "auto":
        return _BYTES_OF_CACHE_DTYPE[options.kv_cache_dtype]
    quantized = model.quantization_config or {}
    if quantized.get("kv_cache_scheme") or quantized.get("kv_cache_quant_algo"):
        raise ConfigError(["--model chooses the KV cache's dtype by its quantization: give --kv-cache-dtype"])
    return _BYTES_OF_DTYPE[_dtype(model, options)]


def _dtype(model: ModelConfig, options: Options) -> str:
    if options.dtype != "auto":
        return options.dtype
    stored = _stored_dtype(model)
    return "bfloat16" if stored == "float32" else stored  # as vLLM does on a GPU


def _stored_dtype(model: ModelConfig) -> str:
    name = (model.dtype or model.torch_dtype or "float32").removeprefix("torch.")
    if name not in _BYTES_OF_DTYPE:
        raise ConfigError([f"--model has the dtype {name[:_SHOWN]!r}: give --dtype and --kv-cache-dtype"])
    return name
