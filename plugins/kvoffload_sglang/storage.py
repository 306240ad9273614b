"""`KVOffloadStorage`: kvoffload's disk tier and remote tier as a storage backend of SGLang's HiCache.

SGLang creates one storage object in each rank's scheduler process. SGLang's prefetch thread asks for the number of
leading pages that exist, and uses the smallest answer of all ranks. SGLang's I/O threads copy pages between the storage
object and SGLang's host pools. Each call has a time limit, because a call that hangs would block SGLang's thread
forever. If a read does not end in time, SGLang computes the missing pages. An exception would end SGLang's thread, so a
call whose arguments do not fit together is answered like a miss, and the log says why, once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

from msgspec.structs import replace
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult

from kvoffload.disk.tier_key import read_tier_key
from kvoffload.logs import get_logger
from kvoffload.model.errors import ConfigError, KVOffloadError, reason_of
from kvoffload.telemetry.logging import log_removed
from kvoffload.tier_cache import Page, TierCache
from kvoffload_sglang.exported import Exported
from kvoffload_sglang.identity import Engine, find_identity, find_problems, is_shared, this_engine
from kvoffload_sglang.pages import HostPages
from kvoffload_sglang.settings import check_settings

if TYPE_CHECKING:
    import torch
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheStorageConfig,
        HiCacheStorageExtraInfo,
        PoolTransfer,
    )
    from sglang.srt.mem_cache.pool_host import HostKVCache

    from kvoffload.model.config import OffloadConfig

ASK_S: Final = 0.5
COPY_S: Final = 1.0
COPY_S_PER_TOKEN: Final = 0.25 / 1024
LONGEST_S: Final = 5.0
"""The longest time limit of a call, in seconds.

The limits grow like the time that SGLang lets a request wait: 1 s, and 0.25 s more per 1,024 tokens. They must stay
well below 10 s: SGLang waits that long for its threads to end before it detaches the backend or flushes its cache. If a
thread is still running then, the detach fails, and the flush stops SGLang.
"""

log = get_logger("tiers")


class KVOffloadStorage(HiCacheStorage):  # type: ignore[misc]  # the type checker runs without SGLang
    """The storage backend of one SGLang rank, for which it opens kvoffload's disk tier and remote tier.

    Args:
        storage_config: SGLang's configuration for storage backends; `extra_config` contains kvoffload's settings.
        _: further arguments from SGLang, which are not used.

    Raises:
        ConfigError: the settings are invalid, or kvoffload cannot store the engine's KV. The message lists all reasons.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, _: Mapping[str, Any] | None = None) -> None:
        self._engine = this_engine(storage_config)
        self._config = _checked(self._engine)
        self._pools: dict[str, HostPages] = {}
        self._caches: dict[str, TierCache] = {}
        self._exported: Exported | None = None
        self._logged: set[str] = set()  # the kinds of problems that the log has

    # -- pools ------------------------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: HostKVCache) -> None:
        """Register the host pool of the attention layers."""
        super().register_mem_pool_host(mem_pool_host)
        self.register_mem_host_pool_v2(mem_pool_host, PoolName.KV)

    def register_mem_host_pool_v2(self, host_pool: HostKVCache, host_pool_name: PoolName) -> None:
        """Register a host pool, such as the pool of recurrent states or of sliding windows.

        Raises:
            ConfigError: kvoffload cannot store the pool's pages.
        """
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if self._caches:
            problem = (
                f"SGLang registers the {name} pool after the storage backend was attached, and its pages are not kept; "
                "attach kvoffload at run time, or use no draft model with a pool of its own"
            )
            raise ConfigError([problem])
        if self._config.disk_path is not None and is_shared(self._engine, name):
            problem = (
                "disk_path: one rank writes this model's KV and all read it, but a folder on the disk belongs to one rank; "
                "use remote_url only"
            )
            raise ConfigError([problem])
        self._pools[name] = HostPages(host_pool, name)

    def on_host_pools_registered(self) -> None:
        """Start to open the tiers for all pools. Background threads read the weights and open the files.

        Raises:
            KVOffloadError: the machine has too little memory for the staging slots.
        """
        config, key = self._config, read_tier_key(self._config.tier_key_file)
        root = config.disk_path or Path.home() / ".cache" / "kvoffload"
        sizes = {name: each.pool.size * each.pool.size_per_token for name, each in self._pools.items()}
        for name, pages in self._pools.items():
            share = config.disk_bytes * sizes[name] // (sum(sizes.values()) * self._engine.ranks)
            self._caches[name] = TierCache(
                partial(find_identity, self._engine, name, pages.pool, root, config.weights_id, key),
                pages.page_bytes,
                replace(config, disk_bytes=max(share, 1)),
                replica=self._engine.replica,
                engine=self._engine.identity,
            )
        if self._engine.storage.enable_storage_metrics:
            labels = self._engine.labels
            self._exported = Exported({(*labels, name): cache for name, cache in self._caches.items()})

    # -- SGLang's calls ---------------------------------------------------------------------------------------------

    def batch_exists(self, keys: Sequence[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Return the number of leading pages of a prefix that the tiers have."""
        return [*self._which(PoolName.KV, keys), False].index(False)

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Return the lengths, in pages, to which a prefix can be restored.

        The result contains the greatest length, the greatest length for each pool, and all lengths that are possible
        in every pool.
        """
        found = self.batch_exists(keys)
        reach: dict[str, int] = {PoolName.KV: found}
        lengths = set(range(1, found + 1))
        for transfer in pool_transfers or ():
            try:
                own = _restorable(transfer, self._which(transfer.name, keys[:found]))
            except ValueError as error:
                self._log_once("policy", str(error))
                own = set()
            reach[transfer.name] = max(own, default=0)
            lengths &= own
        return PoolTransferResult(max(lengths, default=0), reach, sorted(lengths))

    def batch_get_v1(
        self,
        keys: Sequence[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Copy pages into SGLang's pool of attention layers. Return for each page whether the copy is complete."""
        return self._get(PoolName.KV, keys, host_indices, _until(host_indices))

    def batch_set_v1(
        self,
        keys: Sequence[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Store pages of SGLang's pool of attention layers. Return for each page whether a tier now has the page."""
        return self._put(PoolName.KV, keys, host_indices, _until(host_indices))

    def batch_get_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Copy pages into several pools. Return for each pool's pages whether the copy is complete."""
        until = _until(*(each.host_indices for each in transfers))
        return {
            each.name: self._get(each.name, each.keys or (), each.host_indices, until) for each in transfers
        }

    def batch_set_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Store pages of several pools. Return for each pool's pages whether a tier now has the page."""
        until = _until(*(each.host_indices for each in transfers))
        return {
            each.name: self._put(each.name, each.keys or (), each.host_indices, until) for each in transfers
        }

    def _which(self, name: PoolName, keys: Sequence[str]) -> list[bool]:
        cache = self._caches.get(str(name))
        return [False] * len(keys) if cache is None else cache.exists(_digests(keys), ASK_S)

    def _get(
        self, name: PoolName, keys: Sequence[str], host_indices: torch.Tensor, until: float
    ) -> list[bool]:
        cache, pages = self._caches.get(str(name)), self._pages(name, keys, host_indices)
        if cache is None or pages is None:
            return [False] * len(keys)
        return cache.get(_digests(keys), pages, until - time.monotonic())

    def _put(
        self, name: PoolName, keys: Sequence[str], host_indices: torch.Tensor, until: float
    ) -> list[bool]:
        cache, pages = self._caches.get(str(name)), self._pages(name, keys, host_indices)
        if cache is None or pages is None:
            return [False] * len(keys)
        return cache.put(_digests(keys), pages, until - time.monotonic())

    def _pages(
        self, name: PoolName, keys: Sequence[str], host_indices: torch.Tensor | None
    ) -> list[Page] | None:
        """Return the pages of these keys in a host pool; None if there are none, or the pool does not return them."""
        pool = self._pools.get(str(name))
        if pool is None or not keys:
            return None
        count = 0 if host_indices is None else host_indices.numel()
        if host_indices is None or count != len(keys) * pool.page_tokens:
            self._log_once(
                "count", f"{len(keys)} keys of {pool.page_tokens} tokens came with {count} positions"
            )
            return None
        try:
            return pool.at(host_indices)
        except Exception as error:  # SGLang's pool may raise any exception
            self._log_once("pool", f"SGLang's {name} pool returned no pages: {reason_of(error)}")
            return None

    def _log_once(self, kind: str, reason: str) -> None:
        """Log the first problem of its kind. Each further line would say the same."""
        if kind not in self._logged:
            self._logged.add(kind)
            note = "such pages are neither found nor stored, and this is logged once"
            log.warning("tier_call_refused", reason=reason, note=note)

    def clear(self) -> None:
        """Invalidate all stored pages, for this process and for later ones.

        Raises:
            KVOffloadError: a tier does not answer, so a later process might still find the pages. Call `clear` again.
        """
        failed = [name for name, cache in self._caches.items() if not cache.reset()]
        if failed:
            raise KVOffloadError(
                f"pages of {', '.join(failed)} may still be found after a restart; clear again"
            )

    def get_stats(self) -> None:
        """Update kvoffload's metrics in SGLang's `/metrics`. With metrics on, SGLang calls this method in each step."""
        if self._exported is not None:
            try:
                self._exported.update()
            except Exception as error:  # it would end SGLang's scheduler
                self._exported = None
                log_removed("Exported", error)

    def close(self) -> None:
        """Close the tiers' files and connections. Call this method after SGLang's threads have ended."""
        for cache in self._caches.values():
            cache.close()
        if self._exported is not None:
            self._exported.close()

    # -- the interface that SGLang uses only without `interface_v1`, which `check_settings` requires ----------------

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError("kvoffload needs interface_v1")

    get = set = batch_get = batch_set = exists = _refuse


def _checked(engine: Engine) -> OffloadConfig:
    """Validate kvoffload's settings and the engine, and return the settings.

    Raises:
        ConfigError: the settings are invalid, or kvoffload cannot store the engine's KV. The message lists all reasons.
    """
    config = None
    problems: list[str] = []
    try:
        config = check_settings(engine.storage.extra_config or {})
    except ConfigError as error:
        problems += error.problems
    problems += find_problems(engine, has_identity=config is not None and config.weights_id is not None)
    if config is None or problems:
        raise ConfigError(problems)
    return config


def _restorable(transfer: PoolTransfer, has: Sequence[bool]) -> set[int]:
    """Return the lengths, in pages, to which SGLang can restore a prefix from the tiers' pages of one pool.

    Args:
        transfer: SGLang's request. Its hit policy requires all pages of the prefix, or only the last ones.
        has: for each page of the prefix, whether a tier has the page.

    Raises:
        ValueError: the hit policy is not known.
    """
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        width = len(has)
    elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        width = max(1, len(transfer.keys or ()))
    else:
        raise ValueError(f"the hit policy {transfer.hit_policy} of the pool {transfer.name} is not known")
    lengths, run = set(), 0
    for end, is_there in enumerate(has, 1):
        run = run + 1 if is_there else 0
        if run >= min(width, end):
            lengths.add(end)
    return lengths


def _until(*host_indices: torch.Tensor | None) -> float:
    tokens = sum(each.numel() for each in host_indices if each is not None)
    return time.monotonic() + min(COPY_S + COPY_S_PER_TOKEN * tokens, LONGEST_S)


def _digests(keys: Sequence[str]) -> list[bytes]:
    return [_digest(key) for key in keys]


def _digest(key: str) -> bytes:
    """Return the bytes of a key. A key that other texts share, or that has none, stays a text; `TierCache` refuses it."""
    try:
        digest = bytes.fromhex(key)
    except (TypeError, ValueError):
        return cast("bytes", key)
    return digest if digest.hex() == key else cast("bytes", key)
