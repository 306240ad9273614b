from __future__ import annotations

import asyncio
import re
from contextlib import nullcontext

import pytest

from kvoffload.model.config import ADVICE
from kvoffload.model.errors import ConfigError, HostMemoryError
from kvoffload.testing import FakeDevice
from kvoffload.transfer.host_memory import (
    RESERVE,
    MmapAllocator,
    advise_host_bytes,
    available_bytes,
    slots_for,
)
from kvoffload.transfer.ports import ReadText
from tests.gates import ManualExecutor

LAYOUT = FakeDevice(4, [4096, 1024]).layout
MIB = 2**20


def machine(**files: str) -> ReadText:
    """Return a reader of kernel files with these contents. Write `__` for a slash in a file's name."""
    texts = {"/" + name.replace("__", "/").replace("DOT", "."): text for name, text in files.items()}
    return texts.get


def having(left: int) -> ReadText:
    """Return a reader of kernel files on a machine that has this many bytes left beyond the bytes that stay free."""
    return machine(proc__meminfo=f"MemTotal: 9 kB\nMemAvailable: {(RESERVE + left) // 1024} kB\n")


ROOMY = having(1024 * MIB)


def test_the_number_of_slots_is_what_fits_into_memory() -> None:
    assert slots_for(5120, LAYOUT, read=ROOMY) == 1
    assert slots_for(3 * 5120 - 1, LAYOUT, read=ROOMY) == 2


@pytest.mark.parametrize(
    ("size", "ranks", "reason"),
    [
        (5119, 1, "host_bytes gives each rank 5119 bytes, below one block of 5120 bytes"),
        (1024 * MIB + 5120, 1, "above the 1.2 GiB that the machine has left now; 256.0 MiB must stay free"),
        (
            205 * MIB,
            8,
            "all 8 ranks of this machine 1.6 GiB, above the 1.2 GiB that the machine has left now",
        ),
    ],
    ids=["below one block", "above the machine's", "all ranks above the machine's"],
)
def test_a_size_that_does_not_fit_is_refused(size: int, ranks: int, reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        slots_for(size, LAYOUT, ranks=ranks, read=ROOMY)
    assert slots_for(128 * MIB, LAYOUT, ranks=ranks, read=ROOMY) == 128 * MIB // 5120


@pytest.mark.parametrize(
    ("ranks", "local_ranks", "device_mib", "raw", "advised"),
    [
        (1, None, None, {}, "at least three times the device's KV cache, at most 1.0 GiB"),
        (2, 2, 100, {}, "300.0 MiB, 3.0 times the device's KV cache; at most 1.0 GiB"),
        (4, 2, 100, {}, "300.0 MiB, 3.0 times the device's KV cache; at most 2.0 GiB"),
        (1, None, 460, {}, "1.0 GiB, 2.2 times the device's KV cache; at most 1.0 GiB"),
        (1, None, 1024, {}, "1.0 GiB, 1.0 times the device's KV cache, with store_policy auto (lazy with recurrent layers); at most 1.0 GiB"),
        (1, None, 1024, {"disk_path": "/disk", "unknown": 1}, "1.0 GiB, 1.0 times the device's KV cache, with store_policy lazy; at most 1.0 GiB"),
    ],
)  # fmt: skip
def test_the_advised_size_fits_the_machine_and_exceeds_the_device(
    ranks: int, local_ranks: int | None, device_mib: int | None, raw: dict[str, object], advised: str
) -> None:
    device_bytes = None if device_mib is None else device_mib * MIB
    said = advise_host_bytes(ranks, device_bytes, local_ranks, raw, read=ROOMY)
    local = "1 rank" if local_ranks is None else f"{local_ranks} ranks"
    assert said == f"the machine has 1.2 GiB left for {local}; advised: {advised}"


def test_no_size_is_advised_where_nothing_would_stay_free() -> None:
    said = advise_host_bytes(1, MIB, read=having(0))
    assert (
        said == "the machine has 256.0 MiB left for 1 rank, and 256.0 MiB must stay free: give it more memory"
    )


@pytest.mark.parametrize(("left", "fits"), [(3 * 5120, True), (3 * 5120 - 1024, False), (-RESERVE, False)])
def test_the_start_refuses_the_sizes_that_the_arena_would_refuse(left: int, fits: bool) -> None:
    # Regression: in a cgroup with less left than must stay free, the engine started and never got a slot.
    with nullcontext() if fits else pytest.raises(ConfigError, match="must stay free"):
        assert slots_for(3 * 5120, LAYOUT, read=having(left)) == 3
    allocator = MmapAllocator(ManualExecutor(held=False), read=having(left))
    with nullcontext() if fits else pytest.raises(HostMemoryError, match="would leave others less"):
        asyncio.run(allocator.allocate(3 * 5120)).release()


def test_unknown_available_memory_limits_nothing_and_no_size_is_advised() -> None:
    assert available_bytes(machine()) is None
    assert advise_host_bytes(1, MIB, read=machine()) == ADVICE
    assert slots_for(5120 * 10**9, LAYOUT, read=machine()) == 10**9


def test_this_machines_available_memory_is_known() -> None:
    assert slots_for(5120, LAYOUT) == 1


def test_cgroup_version_2_counts_file_cache_as_free_and_includes_parent_groups() -> None:
    files = machine(
        proc__meminfo=f"MemAvailable: {10**9} kB",
        proc__self__cgroup="0::/outer/inner\n",
        sys__fs__cgroup__outer__inner__memoryDOTmax="max\n",
        sys__fs__cgroup__outer__inner__memoryDOTcurrent="50\n",
        sys__fs__cgroup__outer__memoryDOTmax="1000\n",
        sys__fs__cgroup__outer__memoryDOTcurrent="700\n",
        sys__fs__cgroup__outer__memoryDOTstat="anon 1\ninactive_file 250\n",
    )
    assert available_bytes(files) == 550


def test_cgroup_version_1_limits_the_memory() -> None:
    files = machine(
        proc__self__cgroup="5:cpu,cpuacct:/x\n4:memory:/x\n",
        sys__fs__cgroup__memory__x__memoryDOTlimit_in_bytes="1000\n",
        sys__fs__cgroup__memory__x__memoryDOTusage_in_bytes="900\n",
        sys__fs__cgroup__memory__x__memoryDOTstat="inactive_file 1\ntotal_inactive_file 30\n",
    )
    assert available_bytes(files) == 130


def test_a_cgroup_above_its_limit_has_no_memory_left() -> None:
    files = machine(
        proc__self__cgroup="0::/\n",
        sys__fs__cgroup__memoryDOTmax="1000\n",
        sys__fs__cgroup__memoryDOTcurrent="1200\n",
    )
    assert available_bytes(files) == 0
