from __future__ import annotations

import asyncio
import ctypes
import os

import pytest

from kvoffload.transfer.host_memory import HostChunk, MmapAllocator, PreferredNode, preferred_node
from tests.captured_logs import capture_logs
from tests.gates import ManualExecutor

SIZE = 2**20


def allocate(node: PreferredNode | None) -> HostChunk:
    return asyncio.run(MmapAllocator(ManualExecutor(held=False), node=node).allocate(SIZE))


def test_the_thread_that_touches_the_memory_runs_on_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)
    first = min(before)
    read: list[str] = []

    def cpulist(path: str) -> str:
        read.append(path)
        return f"{first},100000-100003\n"

    seen: list[set[int]] = []
    real = ctypes.memset

    def memset(address: int, value: int, size: int) -> int:
        seen.append(os.sched_getaffinity(0))
        return int(real(address, value, size))

    monkeypatch.setattr(ctypes, "memset", memset)
    with capture_logs() as logs:
        node = PreferredNode(3, cpulist)
        for _ in range(2):
            allocate(node).release()
    assert seen == [{first}] * 2
    assert os.sched_getaffinity(0) == before
    assert read == ["/sys/devices/system/node/node3/cpulist"] * 2
    (line,) = logs
    assert (line["event"], line["node"], line["touched_there"]) == ("host_memory_node", 3, True)


@pytest.mark.parametrize("text", ["", "abc", "100000-100003"])
def test_memory_is_allocated_if_the_nodes_processors_cannot_be_used(text: str) -> None:
    before = os.sched_getaffinity(0)
    with capture_logs() as logs:
        allocate(PreferredNode(3, lambda path: text)).release()
    assert os.sched_getaffinity(0) == before
    assert logs[0]["touched_there"] is False


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("0\n", 0), ("-1\n", None), ("", None), (None, None)])
def test_the_devices_numa_node_is_read_from_the_kernel(text: str | None, node: int | None) -> None:
    asked: list[str] = []

    def read(path: str) -> str | None:
        asked.append(path)
        return text

    found = preferred_node("0000:3B:00.0", read)
    assert asked == ["/sys/bus/pci/devices/0000:3b:00.0/numa_node"]
    assert (None if found is None else found.node) == node
