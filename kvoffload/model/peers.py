"""The settings of other products for the same purpose, each with its counterpart here.

This is the only such table: the errors of `parse_config`, `kvoffload settings --from` and docs/coming-from.md use it. Names
and meanings are from the products' documentation and sources of 2026: LMCache 0.5, vLLM 0.33, Dynamo 1.6.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from urllib.parse import urlsplit

import msgspec

_GIB = 2**30
_GB = 10**9

Convert = Callable[[object, Mapping[str, object]], object]
"""Converts a peer's value to ours. The second argument has all the peer's values, by `plain` keys.

It returns None if this value has no counterpart, and "" if the value asks for nothing. A value that the peer would refuse
raises ValueError with the allowed values.
"""


class Counterpart(msgspec.Struct, frozen=True):
    """What kvoffload has in place of a peer's key.

    Args:
        setting: our setting; "" if there is none.
        note: what differs, or what happens instead.
        convert: converts the value; None if the setting must be chosen anew.
        is_per_rank: whether the value counts one rank. Our sizes count all ranks of an engine.
        same: values, as lower-case text, with which the peer does what kvoffload always does.
    """

    setting: str
    note: str
    convert: Convert | None = None
    is_per_rank: bool = False
    same: tuple[str, ...] = ()


class Peer(msgspec.Struct, frozen=True):
    """A product whose settings are known.

    Args:
        connectors: the names of its connectors in vLLM.
        elsewhere: where its settings are, if its connector's configuration has none.
        keys: the counterparts by key. "*" at a key's end stands for any rest. If two keys set one of our settings, the
            earlier key counts.
    """

    connectors: tuple[str, ...]
    elsewhere: str
    keys: Mapping[str, Counterpart]

    def find(self, name: str) -> Counterpart | None:
        """Return the counterpart of a key, of its environment variable, or of its option without dashes."""
        name = plain(name)
        rows = {plain(key): row for key, row in self.keys.items()}
        if row := rows.get(name) or rows.get(f"__{name}"):
            return row
        starts = ((key[:-1], row) for key, row in rows.items() if key.endswith("*"))
        return next((row for start, row in starts if name.startswith(start)), None)

    def has_parts(self, name: str) -> bool:
        """Return whether the parts of this key's value are keys of their own, such as "extra_config.protocol"."""
        return any(plain(key).startswith(f"{plain(name)}.") for key in self.keys)


def find_counterpart(name: object) -> tuple[str, Counterpart] | None:
    """Return the first product that has this key, and the key's counterpart; None if no product has it."""
    for product, peer in PEERS.items() if isinstance(name, str) else ():
        if row := peer.find(str(name)):
            return product, row
    return None


def plain(name: str) -> str:
    """Return the form in which names are compared: LMCACHE_CHUNK_SIZE and lmcache.chunk_size are both chunk_size."""
    return re.sub(r"^(lmcache[_.])+", "", name.lower().replace("-", "_"))


def pairs(peer: Peer, given: Mapping[str, object], start: str = "") -> Iterator[tuple[str, object]]:
    """Yield a peer's keys with their values. Parts that are keys of their own follow a dot."""
    for key, value in given.items():
        name = f"{start}{key}"
        if isinstance(value, Mapping) and peer.has_parts(name):
            yield from pairs(peer, value, f"{name}.")
        elif isinstance(value, list) and peer.has_parts(name):  # each entry names its type
            for one in value:
                parts = dict(one) if isinstance(one, Mapping) else {}
                yield from pairs(peer, {parts.pop("type", "?"): parts}, f"{name}.")
        else:
            yield name, value


def _size(value: object, _: Mapping[str, object], unit: int = 1) -> object:
    try:
        size = int(float(value) * unit) if isinstance(value, int | float | str) else -1
    except (ValueError, OverflowError):
        size = -1
    if size < 0 or isinstance(value, bool):
        raise ValueError("a number, 0 or more")
    return size or ""


def _tokens(value: object, _: Mapping[str, object]) -> object:
    if not re.fullmatch(r"[0-9]{1,18}", value if isinstance(value, str) else repr(value)):
        raise ValueError("a number of tokens, 0 or more")
    return int(str(value))


def _is_on(value: object) -> bool:
    text = str(value).lower() if isinstance(value, bool | int | str) else ""
    if text not in ("true", "1", "false", "0"):
        raise ValueError("true or false")
    return text in ("true", "1")


def _policy(value: object, _: Mapping[str, object]) -> object:
    return "lazy" if _is_on(value) else "eager"


def _disk_hits(value: object, _: Mapping[str, object]) -> object:
    return 0 if _is_on(value) else 1


def _folder(value: object, _: Mapping[str, object]) -> object:
    if value is False:  # LMCache's recipes switch the disk off with it
        return ""
    if not isinstance(value, str) or not value:
        raise ValueError("a folder's path")
    return None if "," in value else value.removeprefix("file://")


def _store(value: object, given: Mapping[str, object]) -> object:
    """Return our URL of LMCache's store. Credentials and options in LMCache's URL are left out."""
    try:
        parts = urlsplit(str(value))
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return None  # several masters
    if parts.scheme == "s3":
        # LMCache's host is the bucket, or the bucket before the endpoint; other endpoints belong into AWS_ENDPOINT.
        bucket, _, endpoint = host.partition(".")
        is_known = not endpoint or (endpoint.startswith("s3.") and endpoint.endswith(".amazonaws.com"))
        return _bucket_url(bucket, given.get("extra_config.s3_file_prefix")) if is_known else None
    option = {"tcp": "", "rdma": "?protocol=rdma"}.get(str(given.get("extra_config.protocol", "tcp")))
    is_mooncake = (
        parts.scheme == "mooncakestore" and re.fullmatch(r"[\w.-]+", host) and port and option is not None
    )
    return f"mooncake://{host}:{port}{option}" if is_mooncake else None


def _object_store(value: object, given: Mapping[str, object]) -> object:
    return _bucket_url(value, given.get("secondary_tiers.obj.prefix"))


def _bucket(value: object, _: Mapping[str, object]) -> object:
    return _bucket_url(value, None)


def _bucket_url(bucket: object, prefix: object) -> object:
    names = f"{bucket}/{prefix or ''}".strip("/")
    return f"s3://{names}" if re.fullmatch(r"[\w.-]+(/[\w.-]+)*", names) else None


def _used_with(value: object, given: Mapping[str, object], key: str) -> object:
    """Ask for nothing if `key`, whose conversion uses this value too, is given."""
    return "" if given.get(key) else None


def _no(note: str, *same: str) -> Counterpart:
    return Counterpart("", note, same=same)


_HOST = "host_bytes counts all ranks of one engine"
_VARIABLE = "not a setting: set the variable "
_BLOCKS = "blocks are those of the engine"
_LRU = "eviction is LRU only"
_SHARED = "host_path shares blocks on one machine, remote_url across machines"
_PREFIXES = "only prefixes are reused"
_ANSWERS = "answers are always stored; a request limits this with max_offload_tokens"
_ENDPOINT = _no(_VARIABLE + "AWS_ENDPOINT, for http AWS_ALLOW_HTTP=true too")
_REGION = _no(_VARIABLE + "AWS_REGION")
_ACCESS = _no(_VARIABLE + "AWS_ACCESS_KEY_ID")
_SECRET = _no(_VARIABLE + "AWS_SECRET_ACCESS_KEY")
_METRICS = _no("metrics are always in vLLM's own /metrics")
_FOR_BYTES = "counts blocks; set {}, which counts bytes, instead"

PEERS = {
    "LMCache in process": Peer(
        ("LMCacheConnectorV1", "LMCacheConnectorV1Dynamic"),
        "its settings are in the file that LMCACHE_CONFIG_FILE names: give that file",
        {
            "max_local_cpu_size": Counterpart(
                "host_bytes", f"GiB of one rank; {_HOST}", partial(_size, unit=_GIB), is_per_rank=True
            ),
            "local_cpu": _no("host memory is always used; disk and remote tier lie below it", "true"),
            "local_disk": Counterpart(
                "disk_path", "one folder, without file://; sharding is not needed", _folder
            ),
            "max_local_disk_size": Counterpart(
                "disk_bytes",
                "GiB of one rank; disk_bytes counts all ranks",
                partial(_size, unit=_GIB),
                is_per_rank=True,
            ),
            "local_disk_path_sharding": _no("each rank has a file of its own in disk_path"),
            "remote_url": Counterpart(
                "remote_url",
                "mooncakestore becomes mooncake, s3 keeps its bucket (an endpoint goes to AWS_ENDPOINT); other stores have no counterpart",
                _store,
            ),
            "extra_config.protocol": Counterpart(
                "remote_url", "part of the URL: ?protocol=rdma", partial(_used_with, key="remote_url")
            ),
            "extra_config.s3_file_prefix": Counterpart(
                "remote_url", "part of the URL: s3://BUCKET/PREFIX", partial(_used_with, key="remote_url")
            ),
            "extra_config.s3_region": _REGION,
            "extra_config.disable_tls": _no(_VARIABLE + "AWS_ALLOW_HTTP=true", "false"),
            "extra_config.aws_access_key_id": _ACCESS,
            "extra_config.aws_secret_access_key": _SECRET,
            "extra_config.global_segment_size": _no(
                "engines give a Mooncake Store no memory: run nodes for it", "0"
            ),
            "extra_config*": _no("settings of one of LMCache's backends"),
            "min_retrieve_tokens": Counterpart("min_load_tokens", "auto measures the number", _tokens),
            "blocking_timeout_secs": Counterpart(
                "remote_timeout_s",
                "remote_timeout_s limits one call, and the engine never waits for it: keep its default",
            ),
            "chunk_size": _no(f"{_BLOCKS}: vLLM's --block-size"),
            "save_decode_cache": _no(_ANSWERS, "true"),
            "save_unfull_chunk": _no("only whole blocks are stored, and tails of recurrent models", "false"),
            "cache_policy": _no(_LRU, "lru"),
            "cost_aware_*": _no(_LRU),
            "numa_mode": _no("host memory is always on the NUMA node of its GPU", "auto"),
            "local_cpu_use_hugepages": _no(
                "host memory asks for transparent huge pages; host_hugetlbfs takes them from a pool", "false"
            ),
            "enable_lazy_memory_allocator": _no(
                "host memory is always pinned in pieces, after the start", "true"
            ),
            "lazy_memory_*": _no("host memory is always pinned in pieces, after the start"),
            "reserve_local_cpu_size": _no(
                "the doctor compares host_bytes with the memory that is left", "0", "0.0"
            ),
            "remote_serde": _no("blocks are stored as they are, without compression", "naive"),
            "use_layerwise": _no("a request waits for all layers of its load", "false"),
            "enable_async_loading": _no("loads never block the engine's step", "true"),
            "pre_caching_hash_algorithm": _no("hashes are vLLM's: --prefix-caching-hash-algo"),
            "priority_limit": _no("per request: max_offload_tokens 0 in kv_transfer_params"),
            "pin_*": _no("copies are abandoned after transfer_timeout_s, and pins end with them"),
            "enable_kv_events": _no("events follow vLLM's --kv-events-config", "false"),
            "enable_blending": _no(_PREFIXES, "false"),
            "blend_*": _no(_PREFIXES),
            "enable_p2p": _no(_SHARED, "false"),
            "p2p_*": _no(_SHARED),
            "transfer_channel": _no(_SHARED),
            "enable_pd": _no(
                "for prefill and decode apart, put a transfer connector beside ours in MultiConnector",
                "false",
            ),
            "pd_*": _no("belongs to the transfer connector"),
            "nixl_*": _no("belongs to the transfer connector"),
            "gds_*": _no("the disk is read through host memory, not by GPUDirect Storage"),
            "use_gds": _no("the disk is read through host memory, not by GPUDirect Storage", "false"),
            "maru_*": _no("no CXL memory"),
            "mp_host": _no("there is no server"),
            "mp_port": _no("there is no server"),
            "enable_controller": _no("there is no controller; routers read vLLM's KV cache events", "false"),
            "controller_*": _no("there is no controller"),
            "lmcache_instance_id": _no("there is no controller"),
            "lmcache_worker_*": _no("there is no controller"),
            "internal_api_server_*": _METRICS,
            "enable_chunk_statistics": _no("journal_path records what was stored and found", "false"),
            "chunk_statistics_*": _no("journal_path records what was stored and found"),
            "lookup_*": _no("lookups are answered in the scheduler's process"),
            "external_lookup_client": _no("lookups are answered in the scheduler's process"),
            "enable_scheduler_bypass_lookup": _no("lookups are answered in the scheduler's process"),
            "hit_miss_ratio": _no("lookups are answered in the scheduler's process"),
            "store_location": _no("tiers are filled in order: host, disk, remote tier"),
            "retrieve_locations": _no("tiers are asked in order: host, disk, remote tier"),
            "storage_plugins": _no("LMCache's plugins do not run here"),
            "remote_storage_plugins": _no("LMCache's plugins do not run here"),
            "runtime_plugin_locations": _no("LMCache's plugins do not run here"),
            "enable_hidden_state_cache": _no("only KV is kept", "false"),
            "hidden_state*": _no("only KV is kept"),
            "max_hidden_state_cpu_size": _no("only KV is kept"),
            "use_native": _no("chooses one of LMCache's adapters"),
            "discard_partial_chunks": _no(
                "only whole blocks are stored, and tails of recurrent models", "true"
            ),
            "skip_last_n_tokens": _no("the scheduler computes at least the last token", "0"),
            "py_enable_gc": _no("garbage collection is the engine's"),
            "use_gpu_connector_v3": _no("chooses one of LMCache's adapters"),
            "remote_config_url": _no("settings are only in the engine's configuration"),
            "app_id": _no("settings are only in the engine's configuration"),
            "script_allowed_imports": _no("no scripts run inside the engine"),
            "audit_actual_remote_url": _no("no audit connector"),
            "LMCACHE_CONFIG_FILE": _no("settings are in kv_connector_extra_config, not in a file"),
            "LMCACHE_FORCE_SKIP_SAVE": _no("per request: max_offload_tokens 0 in kv_transfer_params"),
            "LMCACHE_LOG_LEVEL": _no("logs follow VLLM_LOGGING_LEVEL"),
            "LMCACHE_TRACK_USAGE": _no("no usage statistics are sent", "false"),
        },
    ),
    "vLLM's OffloadingConnector": Peer(
        ("OffloadingConnector",),
        "its size is cpu_bytes_to_use in kv_connector_extra_config",
        {
            "cpu_bytes_to_use": Counterpart("host_bytes", "the same; kvoffload takes this key too", _size),
            "spec_name": _no(
                "tiers follow from disk_path and remote_url", "cpuoffloadingspec", "tieringoffloadingspec"
            ),
            "spec_module_path": _no("tiers follow from disk_path and remote_url"),
            "block_size": _no(f"{_BLOCKS}: vLLM's --block-size"),
            "blocks_per_chunk": _no(f"{_BLOCKS}; each is stored by itself", "1"),
            "eviction_policy": _no(_LRU, "lru"),
            "cache_policy_module_path": _no(_LRU),
            "store_threshold": _no(
                "host memory takes every block; disk_min_hits and remote_min_hits filter below it", "0", "1"
            ),
            "max_tracker_size": _no("hits are counted for all blocks in host memory"),
            "offload_prompt_only": _no(_ANSWERS, "false"),
            "sync_load_budget_bytes": _no("loads never block the engine's step", "0"),
            "self_describing_kv_events": _no("events follow vLLM's --kv-events-config", "false"),
            "canonical_layout": _no("engines with other parallel sizes do not share blocks", "false"),
            "tier_poll_interval_s": _no("tiers are served in each step"),
            "backpressure": _no("open stores have a bound; what exceeds it is not stored"),
            "secondary_tiers.fs.root_dir": Counterpart(
                "disk_path",
                "a local folder; set disk_bytes, because fs has no limit; for a shared folder: remote_url",
                _folder,
            ),
            "secondary_tiers.fs.*": _no("the disk tier has no such option"),
            "secondary_tiers.obj.store_config.bucket": Counterpart(
                "remote_url", "s3://BUCKET/PREFIX", _object_store
            ),
            "secondary_tiers.obj.prefix": Counterpart(
                "remote_url",
                "part of the URL: s3://BUCKET/PREFIX",
                partial(_used_with, key="secondary_tiers.obj.store_config.bucket"),
            ),
            "secondary_tiers.obj.store_config.endpoint_override": _ENDPOINT,
            "secondary_tiers.obj.store_config.scheme": _no(
                _VARIABLE + "AWS_ALLOW_HTTP=true for http", "https"
            ),
            "secondary_tiers.obj.store_config.region": _REGION,
            "secondary_tiers.obj.store_config.access_key": _ACCESS,
            "secondary_tiers.obj.store_config.secret_key": _SECRET,
            "secondary_tiers.obj.store_config.session_token": _no(_VARIABLE + "AWS_SESSION_TOKEN"),
            "secondary_tiers.obj.store_config.ca_bundle": _no(_VARIABLE + "SSL_CERT_FILE"),
            "secondary_tiers.obj.*": _no("the remote tier has no such option"),
            "secondary_tiers.p2p*": _no(_SHARED),
            "secondary_tiers.kvcr*": _no(_SHARED),
            "secondary_tiers*": _no(
                "kvoffload's tiers are disk_path and remote_url; other tiers do not run below it"
            ),
        },
    ),
    "LMCache's server": Peer(
        ("LMCacheMPConnector",),
        """its sizes are options of `lmcache server`: give them as '{"--l1-size-gb": 100}'""",
        {
            "--l1-size-gb": Counterpart(
                "host_bytes",
                "GiB of all engines of the server; host_bytes is of one engine",
                partial(_size, unit=_GIB),
            ),
            "lmcache.mp.lazy_offload": Counterpart("store_policy", "true is lazy, false is eager", _policy),
            "lmcache.mp.lazy_offload_*": _no("the lazy policy has no parameters"),
            "lmcache.mp.save_decode_cache": _no(_ANSWERS, "true"),
            "lmcache.mp.*": _no("there is no server: host memory belongs to the engine"),
            "--l2-adapter": _no(
                "types fs and fs_native: disk_path; mooncake_store and s3: remote_url; others: none"
            ),
            "--otlp-endpoint": Counterpart(
                "otlp_endpoint", "OTLP over HTTP instead of gRPC, such as http://localhost:4318/v1/traces"
            ),
            "--chunk-size": _no(f"{_BLOCKS}: vLLM's --block-size"),
            "--eviction-policy": _no(_LRU, "lru"),
            "--eviction-*": _no("the least recently used block is evicted when a slot is needed"),
            "--engine-type": _no(_PREFIXES, "default"),
            "--hash-algorithm": _no("hashes are vLLM's: --prefix-caching-hash-algo"),
            "--l1-*": _no("host memory is pinned in pieces, after the start"),
            "--l2-*": _no("disk_min_hits and remote_min_hits choose the blocks that go below host memory"),
            "--gds-l1-*": _no("the disk is read through host memory, not by GPUDirect Storage"),
            "--p2p-*": _no(_SHARED),
            "--coordinator-*": _no("there is no coordinator"),
            "--prometheus-port": _METRICS,
            "--trace-*": _no("journal_path records what was stored and found"),
            "--*": _no("belongs to the server; kvoffload runs inside the engine"),
        },
    ),
    "vLLM's --kv-offloading-size": Peer(
        (),
        "give --kv-offloading-size",
        {
            "--kv-offloading-size": Counterpart(
                "host_bytes",
                "GiB of all ranks; remove the option, or vLLM uses its own connector",
                partial(_size, unit=_GIB),
            ),
            "--kv-offloading-backend": _no("remove it together with --kv-offloading-size"),
            "VLLM_USE_SIMPLE_KV_OFFLOAD": _no("chooses between vLLM's own connectors"),
        },
    ),
    "Dynamo's KVBM": Peer(
        ("DynamoConnector",),
        """its settings are variables: give them as '{"DYN_KVBM_CPU_CACHE_GB": 100}'""",
        {
            "DYN_KVBM_CPU_CACHE_GB": Counterpart(
                "host_bytes", f"in 10^9 bytes; {_HOST}", partial(_size, unit=_GB)
            ),
            "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": Counterpart(
                "host_bytes", _FOR_BYTES.format("host_bytes")
            ),
            "DYN_KVBM_DISK_CACHE_DIR": Counterpart(
                "disk_path", "KVBM's default is /tmp; disk_path has none", _folder
            ),
            "DYN_KVBM_DISK_CACHE_GB": Counterpart(
                "disk_bytes",
                "in 10^9 bytes; without disk_path there is no disk tier",
                partial(_size, unit=_GB),
            ),
            "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS": Counterpart(
                "disk_bytes", _FOR_BYTES.format("disk_bytes")
            ),
            "DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER": Counterpart(
                "disk_min_hits",
                "true is 0; otherwise 1, the default: blocks that were found again",
                _disk_hits,
            ),
            "DYN_KVBM_DISK_*": _no("the disk tier needs no such choice"),
            "DYN_KVBM_HOST_OFFLOAD_PREFIX_MIN_PRIORITY": _no("blocks have no priority", "0"),
            "DYN_KVBM_OBJECT_BUCKET": Counterpart(
                "remote_url", "s3://BUCKET/PREFIX, one for all ranks", _bucket
            ),
            "DYN_KVBM_OBJECT_ENABLED": _no("remote_url switches the remote tier on", "1"),
            "DYN_KVBM_OBJECT_ENDPOINT": _ENDPOINT,
            "DYN_KVBM_OBJECT_REGION": _REGION,
            "DYN_KVBM_OBJECT_ACCESS_KEY": _ACCESS,
            "DYN_KVBM_OBJECT_SECRET_KEY": _SECRET,
            "DYN_KVBM_OBJECT_NUM_BLOCKS": _no("the bucket's own rules limit its size"),
            "DYN_KVBM_METRICS": _METRICS,
            "DYN_KVBM_METRICS_PORT": _METRICS,
            "DYN_KVBM_ENABLE_RECORD": _no("journal_path records what was stored and found"),
            "DYN_KVBM_NCCL_MLA_MODE": _no("ranks with the same KV share one copy", "false", "true"),
            "DYN_KVBM_*": _no("belongs to KVBM's leader and transfers; kvoffload runs inside the engine"),
            "leader.cache.host.cache_size_gb": Counterpart(
                "host_bytes", f"in 10^9 bytes; {_HOST}", partial(_size, unit=_GB)
            ),
            "leader.cache.disk.storage_path": Counterpart("disk_path", "the same", _folder),
            "leader.cache.disk.cache_size_gb": Counterpart(
                "disk_bytes",
                "in 10^9 bytes; without disk_path there is no disk tier",
                partial(_size, unit=_GB),
            ),
            "leader.*": _no("belongs to KVBM's leader"),
            "KVBM_*": _no("belongs to KVBM's leader, transfers and policies"),
        },
    ),
    "vLLM's SimpleCPUOffloadConnector": Peer(
        ("SimpleCPUOffloadConnector",),
        "its size is cpu_bytes_to_use in kv_connector_extra_config, 8 GiB by default",
        {
            "cpu_bytes_to_use_per_rank": Counterpart(
                "host_bytes", f"{_HOST}; kvoffload takes this key too", _size, is_per_rank=True
            ),
            "cpu_bytes_to_use": Counterpart("host_bytes", "the same; kvoffload takes this key too", _size),
            "num_cpu_blocks": Counterpart("host_bytes", _FOR_BYTES.format("host_bytes")),
            "lazy_offload": Counterpart(
                "store_policy", "true is lazy, false is eager; kvoffload takes this key too", _policy
            ),
            "kv_offload_backend": _no("host memory is always used; the disk lies below it", "cpu"),
            "disk_path": Counterpart("disk_path", "the same", _folder),
            "disk_capacity_bytes": Counterpart(
                "disk_bytes", "bytes of one rank; disk_bytes counts all ranks", _size, is_per_rank=True
            ),
            "disk_buffer_slots": _no("the disk tier has no such option"),
            "use_page_cache": _no("the disk tier has no such option", "false"),
        },
    ),
}
"""The products by name."""
