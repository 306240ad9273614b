"""Host memory is asked for on the GPU's node; the kernel itself says that it was, and refusals cost nothing."""

from __future__ import annotations

import asyncio
import ctypes
import os
from pathlib import Path

import pytest

from kvoffload.transfer.host_memory import HostChunk, MmapAllocator, PreferredNode, preferred_node
from tests.captured_logs import capture_logs
from tests.gates import ManualExecutor

MAPS = Path("/proc/self/numa_maps")
SIZE = 2**20


def allocate(node: PreferredNode | None) -> HostChunk:
    return asyncio.run(MmapAllocator(ManualExecutor(held=False), node=node).allocate(SIZE))


def policy_of(address: int) -> str:
    """Return what the kernel says of the mapping that holds `address`; nothing if it knows no nodes."""
    if not MAPS.exists():
        return ""
    lines = [line.split() for line in MAPS.read_text().splitlines()]
    return max((int(start, 16), policy) for start, policy, *_ in lines if int(start, 16) <= address)[1]


def test_the_kernel_prefers_the_node_for_the_chunk() -> None:
    """Containers may forbid it; the log then says so, and the chunk is as good as without a node."""
    with capture_logs() as logs:
        chunk = allocate(PreferredNode(0))
    assert (policy_of(chunk.address) == "prefer:0") is logs[0]["is_preferred"]
    assert not any((ctypes.c_ubyte * SIZE).from_address(chunk.address))
    chunk.release()
    other = allocate(None)
    assert policy_of(other.address) != "prefer:0"
    other.release()


def test_the_call_names_the_mapping_and_the_node() -> None:
    calls: list[tuple[object, ...]] = []

    def syscall(*words: object) -> int:
        calls.append(words)
        return 0

    node = PreferredNode(70, syscall)
    with capture_logs() as logs:
        for address in (0x7000_0000_0000, 0x7100_0000_0000):
            with node.claim(address, SIZE):
                pass
    assert [(entry["event"], entry["node"], entry["is_preferred"]) for entry in logs] == [
        ("host_memory_node", 70, True)
    ]
    _, start, size, mode, mask, nodes, flags = calls[1]
    numbers = [word.value for word in (start, size, mode, nodes, flags)]  # type: ignore[attr-defined]
    assert numbers == [0x7100_0000_0000, SIZE, 1, 1024, 0]
    assert isinstance(mask, bytes)
    assert (len(mask), int.from_bytes(mask, "little")) == (1024 // 8, 1 << 70)


@pytest.mark.parametrize("fault", [lambda *words: -1, lambda *words: 1 / 0])
def test_a_refusal_is_said_once_and_the_memory_comes_all_the_same(fault: object) -> None:
    node = PreferredNode(0, fault)  # type: ignore[arg-type]
    with capture_logs() as logs:
        for _ in range(2):
            allocate(node).release()
    (entry,) = logs
    assert entry["is_preferred"] is False
    assert entry["reason"]


def test_a_machine_without_the_call_is_served_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with capture_logs() as logs:
        allocate(PreferredNode(0)).release()
    assert logs[0]["reason"] == "this system has no mbind"


def test_where_the_kernel_may_not_be_asked_the_touching_thread_runs_on_the_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Docker's default profile refuses mbind; a page lies where the thread that first touches it runs."""
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
        allocate(PreferredNode(3, lambda *words: -1, cpulist)).release()
    assert seen == [{first}]
    assert os.sched_getaffinity(0) == before
    assert read == ["/sys/devices/system/node/node3/cpulist"]
    assert (logs[0]["is_preferred"], logs[0]["touched_there"]) == (False, True)


@pytest.mark.parametrize("text", ["", "abc", "100000-100003"])
def test_a_node_whose_processors_may_not_be_used_changes_nothing(text: str) -> None:
    before = os.sched_getaffinity(0)
    with capture_logs() as logs:
        allocate(PreferredNode(3, lambda *words: -1, lambda path: text)).release()
    assert os.sched_getaffinity(0) == before
    assert logs[0]["touched_there"] is False


@pytest.mark.parametrize(
    ("text", "node"), [("1\n", 1), ("0\n", 0), ("-1\n", None), ("", None), (None, None), ("99999\n", None)]
)
def test_the_node_is_what_the_kernel_says_of_the_device(text: str | None, node: int | None) -> None:
    asked: list[str] = []

    def read(path: str) -> str | None:
        asked.append(path)
        return text

    found = preferred_node("0000:3B:00.0", read)
    assert asked == ["/sys/bus/pci/devices/0000:3b:00.0/numa_node"]
    assert (None if found is None else found.node) == node
