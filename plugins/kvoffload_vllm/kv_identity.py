"""Determines the KV identity: everything except the block keys that determines the bytes of vLLM's KV.

    engine created ─▶ first step ─▶ identity known ─▶ disk: folder locked ─▶ sent to workers ─▶ files open ─▶ index read
                                                   └▶ remote tier: generation read ─▶ each job carries the namespace

The seed of the block hashes exists only in the scheduler's process, and only after vLLM has created the engine. So the
scheduler side determines the identity and sends the identity to the workers. The first tier that needs the identity
reads the weights on the tier's thread. The other tiers wait for the result.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvoffload.disk.identity import KVIdentity, cpu_name, with_key
from kvoffload.disk.weights import process_began_ns, weights_identity
from kvoffload.model.errors import DiskError
from kvoffload.runtime.tier_kinds import EngineName

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig
    from vllm.v1.request import Request

    from kvoffload.disk.tier_key import TierKey
    from kvoffload.runtime.scheduler_side import SchedulerSide

_SEEDED = ("sha256", "sha256_cbor")
"""Hash algorithms for which newer versions of vLLM use the same seed in every process."""

_FROM_FOLDER = (
    "auto",
    "hf",
    "safetensors",
    "pt",
    "npcache",
    "mistral",
    "fastsafetensors",
    "instanttensor",
    "runai_streamer",
    "sharded_state",
    "bitsandbytes",
)
"""Load formats in which all weights come from the model's folder."""

_LENGTHLESS_ROPES = {
    "default",
    "linear",
    "ntk",
    "llama3",
    "yarn",
    "deepseek_yarn",
    "deepseek_llama_scaling",
    "proportional",
    "mrope",
    "bailing_mrope",
    "mllama4",
    "openpangu",
}
"""The kinds of RoPE that do not depend on `max_model_len`."""

_NAMES = ("model", "model_weights", "tokenizer", "revision", "tokenizer_revision", "hf_config_path")
"""vLLM's settings that only say where a model is stored."""


class Identification:
    """Determines the KV identity on the scheduler's side.

    Args:
        find: returns the identity of the engine's KV. `Identification` calls `find` once, after vLLM has seeded its
            block hashes.
    """

    def __init__(self, find: Callable[[], KVIdentity]) -> None:
        self._find = find
        self._found: KVIdentity | None = None
        self._finding = threading.Lock()
        self._stepped = threading.Event()
        self._is_closed = False
        self._is_sent = False

    def identify(self) -> KVIdentity:
        """Return the KV identity, after waiting for the engine's first step.

        Call this method on a tier's thread: the first call may read all weights, and other calls wait for that call.

        Raises:
            CancelledError: the engine stopped before the identity was known.
            DiskError: the identity cannot be determined.
        """
        self._stepped.wait()
        with self._finding:
            if self._is_closed:
                raise CancelledError
            if self._found is None:
                self._found = self._find()
            return self._found

    def step(self, offload: SchedulerSide) -> KVIdentity | None:
        """Begin a step. Return the identity in the first step after the disk tier has locked its folder, else None.

        The caller must send the identity to the workers.
        """
        if self._is_sent:
            return None
        self._stepped.set()
        identity = offload.disk_identity
        self._is_sent = identity is not None
        return identity

    def close(self) -> None:
        """End all calls of `identify` with `CancelledError`."""
        self._is_closed = True
        self._stepped.set()


def engine_name(vllm_config: VllmConfig, sharers: int) -> EngineName:
    """Return the names by which all processes of an engine find its host memory, before its KV is identified.

    Args:
        vllm_config: the engine's configuration.
        sharers: how many ranks share one copy of their blocks.
    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    parts = [version("vllm"), model.model, model.dtype, vllm_config.cache_config.cache_dtype]
    parts += [parallel.tensor_parallel_size, parallel.pipeline_parallel_size, sharers]
    if parallel.distributed_executor_backend == "external_launcher":
        parts.append(parallel.rank)  # each rank is an engine to itself, and needs its own rank's memory
    kind = f"vllm-{sha256(repr(parts).encode()).hexdigest()[:16]}"
    return EngineName(kind, engine_life(vllm_config))


def engine_life(vllm_config: VllmConfig) -> str:
    """Return the name of this life of the engine, the same in all of its processes."""
    # `engine_id` tells data-parallel engines apart; an operator may have set it, so that it does not tell lives apart.
    return f"{vllm_config.kv_transfer_config.engine_id} {vllm_config.instance_id}"


def find_problems(vllm_config: VllmConfig, *, has_identity: bool) -> list[str]:
    """Return every reason why other processes could not find this engine's blocks on the disk, in the remote tier or in host memory.

    Args:
        vllm_config: the engine's configuration.
        has_identity: whether the setting `weights_id` names the weights.
    """
    problems = [*_check_seed(vllm_config)]
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        problems.append(
            "disk_path, remote_url and host_path need KV cache scales that are the same at each start, and calculate_kv_scales "
            "measures them anew; take them from the checkpoint"
        )
    if not has_identity:
        for model, load in _models(vllm_config):
            problems += _check_weights(model, load)
    return problems


def find_identity(
    vllm_config: VllmConfig,
    groups: tuple[tuple[str, int, int | None, bool], ...],
    hash_tokens: int,
    root: Path,
    by_hand: str | None = None,
    key: TierKey | None = None,
    sharers: int = 1,
) -> KVIdentity:
    """Return the identity of this engine's KV. Call this function after vLLM has seeded its block hashes.

    Args:
        vllm_config: the engine's configuration.
        groups: the groups that are offloaded, in the form that `KVIdentity` uses.
        hash_tokens: the number of tokens that a block hash covers.
        root: the folder of the cache of weight digests.
        by_hand: the setting `weights_id`; if it is None, the function may read all weights.
        key: authenticates the KV and the cached digests; None without authentication.
        sharers: how many ranks share one copy of their blocks.

    Raises:
        DiskError: the identity cannot be determined.
    """
    parallel = vllm_config.parallel_config
    try:
        weights = f"named {by_hand}" if by_hand is not None else _weights(vllm_config, root, key)
        identity = KVIdentity(
            engine=f"vllm {version('vllm')}",
            weights=weights,
            keys=_keys(vllm_config),
            parallel={
                "tensor": parallel.tensor_parallel_size,
                "pipeline": parallel.pipeline_parallel_size,
                "decode context": parallel.decode_context_parallel_size,
                "prefill context": parallel.prefill_context_parallel_size,
                # how many neighbouring tokens a rank has before the next rank's begin
                "interleave": parallel.cp_kv_cache_interleave_size,
                "sharers": sharers,
            },  # not the data-parallel size: each data-parallel engine has the whole model
            settings={**_settings(vllm_config), "hash_tokens": str(hash_tokens)},
            groups=groups,
        )
        return with_key(identity, key)
    except DiskError:
        raise
    except Exception as error:  # vLLM and the Hugging Face library may raise any exception
        raise DiskError(f"what this engine's KV depends on cannot be determined: {error!r}") from error


def _check_seed(vllm_config: VllmConfig) -> Iterator[str]:
    from vllm.v1.core import kv_cache_utils

    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    is_fixed = hasattr(kv_cache_utils, "get_none_hash_seed") and algorithm in _SEEDED
    if not is_fixed and "PYTHONHASHSEED" not in os.environ:
        yield (
            "disk_path, remote_url and host_path need block hashes that are the same at each start, and this vLLM seeds "
            f"those of {algorithm} at random; set PYTHONHASHSEED to one number in the environment of all processes"
        )


def _check_weights(model: ModelConfig, load: LoadConfig) -> Iterator[str]:
    from vllm import envs

    reason = None
    if envs.VLLM_USE_MODELSCOPE:
        reason = "they come from ModelScope"
    elif getattr(model, "model_weights", ""):
        reason = "they are not read from a folder"
    elif load.load_format not in _FROM_FOLDER:
        reason = f"load_format is {load.load_format!r}"
    elif Path(model.model).is_file():
        reason = "the model is a file and not a folder"
    if reason is not None:
        yield (
            f"disk_path, remote_url and host_path: the weights of {model.model} cannot be identified, because {reason}; set "
            "weights_id to a name that changes with the weights"
        )


def _models(vllm_config: VllmConfig) -> list[tuple[ModelConfig, LoadConfig]]:
    """Return the model and the draft model, if there is one, each paired with its load configuration."""
    load = vllm_config.load_config
    models = [(vllm_config.model_config, load)]
    draft: Any = vllm_config.speculative_config
    if draft is not None and getattr(draft, "draft_model_config", None) is not None:
        models.append((draft.draft_model_config, getattr(draft, "draft_load_config", None) or load))
    return models


def _weights(vllm_config: VllmConfig, root: Path, key: TierKey | None) -> str:
    folders = [_folder(model, load) for model, load in _models(vllm_config)]
    began = process_began_ns()
    return ", ".join(
        weights_identity(folder, root / "weights.json", key=key, loaded_ns=began)
        for folder in dict.fromkeys(folders)
    )


def _folder(model: ModelConfig, load: LoadConfig) -> Path:
    """Return the folder with the model's files: a local folder, or a snapshot in the Hugging Face cache."""
    if (folder := Path(model.model)).is_dir():
        return folder
    from huggingface_hub import snapshot_download

    commit = getattr(model.hf_config, "_commit_hash", None)
    revision = commit if commit and not model.hf_config_path else model.revision
    return Path(
        snapshot_download(model.model, revision=revision, cache_dir=load.download_dir, local_files_only=True)
    )


def _keys(vllm_config: VllmConfig) -> str:
    from vllm.v1.core import kv_cache_utils

    return f"{vllm_config.cache_config.prefix_caching_hash_algo} {kv_cache_utils.NONE_HASH.hex()}"


def _settings(vllm_config: VllmConfig) -> dict[str, str]:
    """Return the settings that change the KV: some by name, the rest through vLLM's own digests."""
    model, cache, load = vllm_config.model_config, vllm_config.cache_config, vllm_config.load_config
    attention: Any = getattr(vllm_config, "attention_config", None)
    draft: Any = vllm_config.speculative_config
    layout = getattr(cache, "kv_cache_layout", None) or os.environ.get("VLLM_KV_CACHE_LAYOUT")
    return {
        "dtype": str(model.dtype),
        "kv_dtype": str(cache.cache_dtype),
        "quantization": str(model.quantization),
        "layout": str(layout),
        "device": _device(),
        "load": f"{load.load_format} {load.model_loader_extra_config!r}",
        "models": " ".join(_digest(each) for each, _ in _models(vllm_config)),
        "cache": cache.compute_hash(),
        "attention": "" if attention is None else attention.compute_hash(),
        "draft": "" if draft is None else f"{draft.method} {draft.num_speculative_tokens}",
    }


def _digest(model: ModelConfig) -> str:
    """Return vLLM's digest of a model's settings and configuration, without the model's location."""
    nameless = copy.copy(model)
    for name in _NAMES:
        if hasattr(nameless, name):
            setattr(nameless, name, "")
    if not _depends_on_length(model.hf_config.to_dict()):
        nameless.max_model_len = 0
    return str(nameless.compute_hash())


def _depends_on_length(hf_config: Mapping[str, Any]) -> bool:
    """Return whether a model's KV may depend on `max_model_len`.

    vLLM uses `max_model_len` to choose LongRoPE's factors and to switch on Llama 4's temperature tuning. Some models
    use it as the trained length in dynamic NTK scaling. For all other models, the length only limits requests, so
    engines with different lengths can share blocks.
    """
    return "llama4" in str(hf_config.get("model_type")) or not _rope_types(hf_config) <= _LENGTHLESS_ROPES


def _rope_types(settings: Mapping[str, Any], *, in_rope: bool = False) -> set[str]:
    """Return all kinds of RoPE in a model's configuration, including the kinds for nested models and single layers."""
    found = {str(settings[name]) for name in ("rope_type", "type") if in_rope and name in settings}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            is_rope = in_rope or name in ("rope_parameters", "rope_scaling")
            found |= _rope_types(value, in_rope=is_rope)
    return found


def _device() -> str:
    """Return the GPU's name, or a digest of the CPU's instruction set if vLLM runs on a CPU."""
    from vllm.platforms import current_platform

    return cpu_name() if current_platform.is_cpu() else str(current_platform.get_device_name())


def persists(request: Request) -> bool:
    """Return whether a request's block keys identify the request's KV after the engine has ended.

    The keys cover an adapter's name and path, but not the adapter's weights. The keys cover the digest of an image,
    audio or video, unless the client named the item; then the keys cover only the name.
    """
    named = all(_is_digest(each.identifier) for each in request.mm_features or ())
    return request.lora_request is None and named


_SHORTEST_DIGEST = 64  # hexadecimal digits of a blake3 or sha256 digest


def _is_digest(name: str) -> bool:
    return len(name) >= _SHORTEST_DIGEST and not name.strip("0123456789abcdef")
