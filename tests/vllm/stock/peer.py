"""Runs vLLM's own `SimpleCPUOffloadConnector` on a machine without a GPU, for comparisons.

The connector's decisions, hooks and bookkeeping are vLLM's. Only what needs a device is replaced: streams and
events are fakes, and copies between device and host are copies within host memory, on a thread or inside the
hook. `kv_transfer` selects this connector.
"""

from __future__ import annotations

import queue
import threading
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import (
    SimpleCPUOffloadConnector,
)
from vllm.v1.simple_kv_offload import worker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import KVCacheConfig

Caches = dict[str, torch.Tensor]  # for each region's name, a tensor `[blocks, bytes of a block]`


def kv_transfer(host_bytes: int, *, lazy: bool = False, inline: bool = False) -> dict[str, Any]:
    """Return the engine's option `kv_transfer_config` for this connector.

    Args:
        host_bytes: the host memory of all ranks together, in bytes.
        lazy: store blocks that are about to be evicted, instead of blocks that were just computed.
        inline: copy inside the hook instead of on a thread, so that runs are reproducible.
    """
    extra = {"cpu_bytes_to_use": host_bytes, "lazy_offload": lazy, "copies_inline": inline}
    return {
        "kv_connector": "PeerOnHost",
        "kv_connector_module_path": __name__,
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


class PeerOnHost(SimpleCPUOffloadConnector):  # type: ignore[misc]  # vLLM is not where types are checked
    """vLLM's connector, with a worker side that copies within host memory."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        inline = vllm_config.kv_transfer_config.get_from_extra_config("copies_inline", False)
        worker.DmaCopyBackend = partial(HostCopies, inline)
        worker.torch = SimpleNamespace(**{**vars(torch), "cuda": _CUDA, "Event": _Done})
        worker.PIN_MEMORY = False
        super().__init__(vllm_config, role, kv_cache_config)

    def shutdown(self) -> None:
        """Also end the thread that copies, which vLLM's own class leaves running."""
        super().shutdown()
        if (backend := getattr(self.worker_handler, "_backend", None)) is not None:
            backend.shutdown()


class HostCopies:
    """Copies blocks within host memory in order, on a thread or inside the hook."""

    def __init__(self, inline: bool) -> None:
        self._inline = inline
        self._orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="peer-copies", daemon=True)
        self._device: Caches = {}
        self._host: Caches = {}

    def init(self, gpu_caches: Caches, cpu_caches: Caches, *_: object) -> None:
        """Set the caches for all later copies."""
        self._device, self._host = gpu_caches, cpu_caches
        if not self._inline:
            self._thread.start()

    def launch_copy(
        self,
        src_blocks: Sequence[int],
        dst_blocks: Sequence[int],
        is_store: bool,
        event_idx: int,
        events_list: list[tuple[int, _Done]],
        wait_event: object = None,  # not needed: on a CPU, the forward pass has already ended
    ) -> None:
        """Submit a copy. When it has ended, append its number to `events_list`."""
        sides = (self._device, self._host) if is_store else (self._host, self._device)
        order = partial(_copy, *sides, src_blocks, dst_blocks, event_idx, events_list)
        if self._inline:
            order()
        else:
            self._orders.put(order)

    def shutdown(self) -> None:
        """End the thread after all submitted copies."""
        if self._thread.is_alive():
            self._orders.put(None)
            self._thread.join()

    def _serve(self) -> None:
        while (order := self._orders.get()) is not None:
            order()


def _copy(
    source: Caches,
    target: Caches,
    source_blocks: Sequence[int],
    target_blocks: Sequence[int],
    number: int,
    ended: list[tuple[int, _Done]],
) -> None:
    here, there = torch.tensor(source_blocks), torch.tensor(target_blocks)
    for name, region in source.items():
        target[name][there] = region[here]
    ended.append((number, _Done()))


class _Done:
    """Replaces a completed CUDA event."""

    def record(self, stream: object = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class _Stream:
    def __init__(self, priority: int = 0) -> None:
        self.priority = priority

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0


_CUDA = SimpleNamespace(Stream=_Stream, current_stream=_Stream)
