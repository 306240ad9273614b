"""Determines the KV identity: everything except the page keys that determines the bytes of SGLang's KV.

SGLang's page keys are digests of tokens and of a request's salt, and do not depend on the model. So the identity must
include the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvoffload.disk.identity import KVIdentity, cpu_name
from kvoffload.disk.weights import process_began_ns, weights_identity
from kvoffload.model.engine import EngineIdentity
from kvoffload.model.errors import DiskError

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.pool_host import HostKVCache

    from kvoffload.disk.tier_key import TierKey

_FROM_FOLDER = ("auto", "safetensors", "pt", "npcache", "fastsafetensors", "runai_streamer", "sharded_state")
"""Load formats in which all weights come from the model's folder."""

_ELSEWHERE = (
    "custom_weight_loader",
    "quantization_param_path",
    "modelopt_checkpoint_restore_path",
    "decrypted_config_file",
    "decrypted_draft_config_file",
    "remote_instance_weight_loader_seed_instance_ip",
    "modelexpress_config",
    "weight_cache_socket",
    "speculative_token_map",
    "uno_lora_path",
)
"""Settings with which SGLang loads weights or other inputs of the KV from a place that this module does not read."""

_WITH_VALUES = ("model", "exec", "spec")
"""Groups of SGLang's settings that may change KV values.

All settings in these groups are part of the identity, including settings that a later version of SGLang adds.
"""

_WITHOUT_VALUES = ("exec.graph", "exec.overlap", "exec.offload")
_PLACES = (
    "model_path",
    "revision",
    "download_dir",
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
    "model_checksum",
    "startup_weight_load_mode",
    "weight_loader_",
    "weight_cache_",
    "remote_instance_",
    "checkpoint_engine_",
    "engine_info_",
    "enable_watermark",
    "watermark_",
    "enable_return_",
    "sampling_backend",
    "grammar_backend",
    "spec_trace_dir",
)
"""Prefixes of settings in `_WITH_VALUES` that cannot change KV values.

These settings say where something is stored, or change only the answers.
"""


@dataclass(frozen=True)
class Engine:
    """A description of the SGLang engine in this process, which runs one rank.

    Args:
        settings: SGLang's settings after SGLang has filled in its defaults.
        namespaces: the names of the settings in each of SGLang's groups of settings.
        storage: SGLang's configuration for storage backends.
        replica: the engine's index among the data-parallel replicas.
        device: the name of the GPU, or of the CPU without a GPU. The layout of a page may depend on the device.
    """

    settings: Mapping[str, Any]
    namespaces: Mapping[str, tuple[str, ...]]
    storage: HiCacheStorageConfig
    replica: int
    device: str

    @property
    def ranks(self) -> int:
        """The number of ranks that share the disk space in the setting `disk_bytes`."""
        return int(self.storage.tp_size * self.storage.pp_size * self.storage.attn_cp_size)

    @property
    def labels(self) -> tuple[str, str, str]:
        """The label values of this rank's metrics: the model's name, the replica and the rank."""
        storage = self.storage
        rank = (
            storage.pp_rank * storage.attn_cp_size + storage.attn_cp_rank
        ) * storage.tp_size + storage.tp_rank
        return self.identity.model, str(self.replica), str(rank)

    @property
    def identity(self) -> EngineIdentity:
        """The engine's name and version, the model's name and the replica, for logs and metrics."""
        return EngineIdentity(
            "sglang", version("sglang"), str(self.settings["served_model_name"]), self.replica
        )


def this_engine(storage: HiCacheStorageConfig) -> Engine:
    """Return a description of the SGLang engine in this process."""
    import torch
    from msgspec.structs import fields
    from sglang.srt.runtime_context import get_parallel, get_server_args
    from sglang.srt.server_args import ServerArgs

    server = get_server_args()
    namespaces = {each._NS_PATH: tuple(one.name for one in fields(each)) for each in ServerArgs._NAMESPACES}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()
    replica = storage.dp_rank or get_parallel().dp_rank or 0
    return Engine(server.resolved_dict(), namespaces, storage, replica, device)


def find_problems(engine: Engine, *, has_identity: bool) -> Iterator[str]:
    """Yield every reason why other processes could not find this engine's pages.

    Args:
        engine: the engine.
        has_identity: whether the setting `weights_id` names the weights.
    """
    if engine.settings["enable_lora"] or engine.settings["lora_paths"]:
        yield "LoRA is on, and SGLang's keys know an adapter's name and path only, not its weights"
    if has_identity:
        return
    for name in _models(engine):
        if reason := _unreadable(engine, name):
            yield (
                f"the weights of {name} cannot be identified, because {reason}; set weights_id to a name that changes "
                "with the weights"
            )


def find_identity(
    engine: Engine, pool_name: str, pool: HostKVCache, root: Path, by_hand: str | None, key: TierKey | None
) -> KVIdentity:
    """Return the KV identity of the pages in a host pool.

    Args:
        engine: the engine.
        pool_name: SGLang's name for the pool.
        pool: the host pool.
        root: the folder of the cache of weight digests.
        by_hand: the setting `weights_id`; if it is None, the function may read all weights.
        key: authenticates the cached digests; None without authentication.

    Raises:
        DiskError: the identity cannot be determined.
    """
    try:
        return KVIdentity(
            engine=f"sglang {version('sglang')}",
            weights=f"named {by_hand}" if by_hand is not None else _weights(engine, root, key),
            keys="sha256 of tokens",
            parallel=_parallel(engine, pool_name),
            settings={
                "pool": pool_name,
                "kind": type(pool).__name__,
                "layout": str(pool.layout),
                "format": str(pool.storage_format_tag),
                "dtype": str(pool.dtype),
                "page_tokens": str(pool.page_size),
                "layers": f"{getattr(pool, 'start_layer', '')} to {getattr(pool, 'end_layer', '')}",
                "device": engine.device,
                "sglang": _digest(engine),
            },
        )
    except DiskError:
        raise
    except Exception as error:  # SGLang or the Hugging Face library may raise any exception
        raise DiskError(f"what this engine's KV depends on cannot be determined: {error!r}") from error


def is_shared(engine: Engine, pool_name: str) -> bool:
    """Return whether all tensor-parallel ranks have the same pages in a pool. Only one rank writes such pages."""
    storage = engine.storage
    return storage.is_mla_model and storage.tp_size > 1 and pool_name not in ("mamba", "draft", "draft_swa")


def _parallel(engine: Engine, pool_name: str) -> dict[str, int]:
    storage = engine.storage
    shared = is_shared(engine, pool_name)
    return {
        "tensor": storage.tp_size,
        "tensor_rank": 0 if shared else storage.tp_rank,
        "pipeline": storage.pp_size,
        "pipeline_rank": storage.pp_rank,
        "context": storage.attn_cp_size,
        "context_rank": storage.attn_cp_rank,
    }


def _models(engine: Engine) -> list[str]:
    settings = engine.settings
    return [
        name
        for name in (settings["model_path"], settings["speculative_draft_model_path"])
        if name is not None
    ]


def _unreadable(engine: Engine, name: str) -> str | None:
    settings = engine.settings
    if settings["load_format"] not in _FROM_FOLDER:
        return f"load_format is {settings['load_format']!r}"
    if Path(name).is_file():
        return "the model is a file and not a folder"
    if used := [each for each in _ELSEWHERE if settings.get(each)]:
        return f"{used[0]} is set"
    return None


def _weights(engine: Engine, root: Path, key: TierKey | None) -> str:
    settings = engine.settings
    revisions = (settings["revision"], settings["speculative_draft_model_revision"])
    folders = [
        _folder(name, revision, settings["download_dir"])
        for name, revision in zip(_models(engine), revisions, strict=False)
    ]
    began = process_began_ns()
    return ", ".join(
        weights_identity(folder, root / "weights.json", key=key, loaded_ns=began)
        for folder in dict.fromkeys(folders)
    )


def _folder(name: str, revision: str | None, cache: str | None) -> Path:
    """Return the folder with the model's files: a local folder, or a snapshot in the Hugging Face cache."""
    if (folder := Path(name)).is_dir():
        return folder
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True))


def _digest(engine: Engine) -> str:
    """Return a digest of all settings that may change KV values."""
    names = [
        name
        for group, members in engine.namespaces.items()
        if group.split(".")[0] in _WITH_VALUES and group not in _WITHOUT_VALUES
        for name in members
        if not name.startswith(_PLACES)
    ]
    values = {name: engine.settings[name] for name in names}
    return sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]
