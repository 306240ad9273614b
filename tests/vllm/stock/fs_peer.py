"""Runs vLLM's own `OffloadingConnector` with its `fs` tier on a machine without a GPU, for comparisons.

The connector, the scheduler's side, the CPU tier, the `fs` tier and the worker are vLLM's. Only what needs a
device is replaced: streams and events are fakes, and copies between device and host are copies within host
memory, on one thread per direction. `kv_transfer` selects this connector.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

if TYPE_CHECKING:
    from pathlib import Path

    from vllm.v1.kv_offload.base import CanonicalKVCaches


def kv_transfer(host_bytes: int, folder: Path, tier: Mapping[str, object] | None = None) -> dict[str, Any]:
    """Return the engine's option `kv_transfer_config` for this connector.

    Args:
        host_bytes: the host memory of all ranks together, in bytes.
        folder: the folder for the `fs` tier's files.
        tier: the configuration of another tier, used instead of the `fs` tier.
    """
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "TieringOnHost",
            "spec_module_path": __name__,
            "cpu_bytes_to_use": host_bytes,
            "secondary_tiers": [dict(tier or {"type": "fs", "root_dir": str(folder)})],
        },
    }


class TieringOnHost(TieringOffloadingSpec):  # type: ignore[misc]  # vLLM is not where types are checked
    """vLLM's tiers, with a worker that copies within host memory."""

    _worker: Any

    def get_worker(self, kv_caches: CanonicalKVCaches) -> Any:
        """Return vLLM's worker. It does not need a GPU."""
        if self._worker is None:
            device = Device()
            gpu_worker.current_platform = gpu_worker.ops = device
            gpu_worker.torch = SimpleNamespace(**{**vars(torch), "Event": _Event})
            gpu_worker.PIN_MEMORY = False
            tensors = [replace(each, tensor=each.tensor.as_subclass(_OnDevice)) for each in kv_caches.tensors]
            self._worker = self.create_worker(replace(kv_caches, tensors=tensors))
        return self._worker


class _OnDevice(torch.Tensor):
    """A tensor that claims to be on a GPU, as the worker requires."""

    is_cuda = True


class _Stream:
    """Replaces a CUDA stream. Copies run in the order of their submission. `last` is the latest copy."""

    def __init__(self) -> None:
        self.last: Future[float] | None = None

    def wait_stream(self, other: _Stream) -> None:
        pass

    def wait_event(self, event: _Event) -> None:
        pass


class _Event:
    """Replaces a CUDA event. It is complete when all copies submitted before it have ended."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._after: Future[float] | None = None
        self._recorded_s = 0.0

    def record(self, stream: _Stream) -> None:
        self._after, self._recorded_s = stream.last, time.perf_counter()

    def query(self) -> bool:
        return self._after is None or self._after.done()

    def synchronize(self) -> None:
        if self._after is not None:
            self._after.result()

    def elapsed_time(self, end: _Event) -> float:
        """Return the milliseconds from this event to `end`."""
        ended_s = end._recorded_s if end._after is None else end._after.result()
        return 1e3 * (ended_s - self._recorded_s)


class Device:
    """Replaces vLLM's platform and its kernels in the worker's module."""

    Stream = _Stream

    def __init__(self) -> None:
        self._current = _Stream()
        self._threads = {is_load: ThreadPoolExecutor(1, f"fs-peer-{is_load=}") for is_load in (False, True)}

    @staticmethod
    def is_xpu() -> bool:
        return False

    def current_stream(self) -> _Stream:
        return self._current

    @contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        stream.last = None
        yield
        self._current = before

    def swap_blocks_batch(
        self, src: torch.Tensor, dst: torch.Tensor, sizes: torch.Tensor, *, is_src_access_order_any: bool
    ) -> None:
        """Copy between addresses, on the thread for loads or the thread for stores.

        Only loads set `is_src_access_order_any`.
        """
        orders = zip(dst.tolist(), src.tolist(), sizes.tolist(), strict=True)
        self._current.last = self._threads[is_src_access_order_any].submit(_copy, list(orders))


def _copy(orders: list[tuple[int, int, int]]) -> float:
    for order in orders:
        ctypes.memmove(*order)
    return time.perf_counter()
