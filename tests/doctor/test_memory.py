"""Host memory against fake machines: what is wanted, what is left, what may be pinned, and swap."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.checks.check import Check, Setup, run_checks
from kvoffload.checks.machine import Machine, Space
from kvoffload.checks.memory import CHECKS, SHARED_MEMORY, needed_bytes
from kvoffload.model.config import OffloadConfig
from kvoffload.model.errors import ConfigError
from kvoffload.testing import FakeDevice
from kvoffload.transfer.arena import CHUNK_BYTES, Arena
from kvoffload.transfer.footprint import KERNEL_PAGE, arena_bytes
from kvoffload.transfer.host_memory import HostChunk, slots_for
from tests.doctor.trees import GIB, H200, ask, machine, setup

MACHINE, CGROUP, LOCKED, SWAP, SEGMENTS = CHECKS
IN_V1 = {
    "proc/self/cgroup": "4:memory:/pod/engine\n3:cpu:/x\n0::/\n",
    "sys/fs/cgroup/engine/memory.max": None,
}


class Recorder:
    """Hands out nothing, and remembers what was asked for."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    async def allocate(self, size: int) -> HostChunk:
        self.sizes.append(size)
        return HostChunk(4096, size, lambda: None)


@given(
    st.lists(st.integers(1, 70000), min_size=1, max_size=4),
    st.integers(0, 5 * CHUNK_BYTES // 2),
)
def test_what_is_expected_is_what_the_arena_takes(pages: list[int], share: int) -> None:
    layout = FakeDevice(1, pages).layout
    asked = Recorder()
    arena = Arena(layout, share // layout.slot_bytes, asked)
    asyncio.run(arena.prepare())
    assert arena_bytes(share, pages) == sum(-(-size // KERNEL_PAGE) * KERNEL_PAGE for size in asked.sizes)


@pytest.mark.parametrize(
    ("known", "needed"),
    [
        (setup(10), 10),
        (setup(10, ranks=2), 10),
        (setup(11, ranks=2), 10),  # the odd byte is not used
        (setup(10 * 4096, ranks=2, block_bytes=4096), 10 * 4096),
        # Regions rounded, each rank.
        (
            setup(2 * 4096, ranks=2, block_bytes=3, page_bytes=(1, 1, 1)),
            4 * 4096,
        ),
        (setup(2 * 4096, ranks=2, block_bytes=3, page_bytes=(1,)), 2 * 4096),  # one page is not all of them
        (Setup(config=None), None),
        (Setup(config=OffloadConfig(host_bytes_per_rank=5)), None),
        (Setup(config=OffloadConfig(host_bytes_per_rank=5), ranks=3), 15),
    ],
)
def test_what_is_needed(known: Setup, needed: int | None) -> None:
    found = needed_bytes(known)
    assert (found and found[0]) == needed


@pytest.mark.parametrize(
    ("host_gib", "verdict", "text"),
    [
        (80, "go", "80.0 GiB of all ranks fit the 100.0 GiB that the machine has left now"),
        (
            95,
            "warning",
            "95.0 GiB of all ranks leave less than a tenth of the 100.0 GiB that the machine has left",
        ),
        (101, "no-go", "101.0 GiB of all ranks are more than the 100.0 GiB that the machine has left"),
    ],
)
def test_the_machines_memory(tmp_path: Path, host_gib: int, verdict: str, text: str) -> None:
    found = ask(MACHINE, setup(host_gib * GIB), machine(tmp_path))
    assert found[0] == verdict
    assert text in found[1]


@given(
    st.lists(st.integers(1, 70000), min_size=1, max_size=3), st.integers(0, 2**28), st.integers(1, 4),
    st.integers(-9, 9),
)  # fmt: skip
def test_property_a_start_is_refused_where_the_check_says_no_go(
    pages: list[int], share: int, ranks: int, above: int
) -> None:
    """By a few KiB more or less than there is, which is what rounding takes."""
    layout, share = FakeDevice(1, pages).layout, share + sum(pages)
    left = ranks * share // 1024 + above
    read = {"/proc/meminfo": f"MemAvailable: {left} kB\n"}.get
    known = setup(share * ranks, ranks=ranks, block_bytes=layout.slot_bytes, page_bytes=tuple(pages))
    (answer,) = run_checks([MACHINE], known, Machine(read=read))
    is_granted = True
    try:
        slots_for(share, layout, ranks=ranks, read=read)
    except ConfigError:
        is_granted = False
    assert is_granted is (answer.finding.verdict != "no-go"), answer


@pytest.mark.parametrize("text", [None, "", "MemAvailable:\n", "MemAvailable: lots kB\n", "\0\0"])
def test_a_machine_that_does_not_say(tmp_path: Path, text: str | None) -> None:
    assert ask(MACHINE, setup(), machine(tmp_path, {"proc/meminfo": text}))[0] == "not known"


def test_without_usable_settings_nothing_is_guessed(tmp_path: Path) -> None:
    verdict, text = ask(MACHINE, Setup(config=None), machine(tmp_path))
    assert verdict == "not known"
    assert "the settings cannot be used" in text


def test_without_the_number_of_ranks_one_share_is_compared(tmp_path: Path) -> None:
    def asked(share: int) -> tuple[str, str]:
        known = Setup(config=OffloadConfig(host_bytes_per_rank=share))
        return ask(MACHINE, known, machine(tmp_path))

    assert asked(101 * GIB)[0] == "no-go"
    verdict, text = asked(30 * GIB)
    assert verdict == "not known"
    assert text.endswith("are enough for 3")


@pytest.mark.parametrize(
    ("files", "verdict", "text"),
    [
        ({}, "go", "no cgroup limits memory"),
        (
            {"sys/fs/cgroup/engine/memory.max": f"{16 * GIB}\n"},
            "go",
            "8.0 GiB of all ranks fit the 16.0 GiB that the cgroup /sys/fs/cgroup/engine has left now",
        ),
        (
            # a parent allows less than its child, part of which is file cache
            {
                "proc/self/cgroup": "0::/pod/engine\n",
                "sys/fs/cgroup/pod/engine/memory.max": f"{16 * GIB}\n",
                "sys/fs/cgroup/pod/engine/memory.current": "0\n",
                "sys/fs/cgroup/pod/memory.max": f"{6 * GIB}\n",
                "sys/fs/cgroup/pod/memory.current": f"{2 * GIB}\n",
                "sys/fs/cgroup/pod/memory.stat": f"anon 5\ninactive_file {GIB}\n",
            },
            "no-go",
            "8.0 GiB of all ranks are more than the 5.0 GiB that the cgroup /sys/fs/cgroup/pod has left",
        ),
        (
            {"sys/fs/cgroup/engine/memory.max": f"{4 * GIB}\n", "sys/fs/cgroup/engine/memory.current": "x"},
            "not known",
            "the memory limits of cgroups: none of this process can be read",
        ),
        ({"sys/fs/cgroup/engine/memory.max": "\n"}, "not known", "none of this process can be read"),
        ({"sys/fs/cgroup/engine/memory.max": None}, "not known", "none of this process can be read"),
        ({"proc/self/cgroup": None}, "not known", "none of this process can be read"),
        ({"proc/self/cgroup": "nonsense\n0:\n\n::::\n"}, "not known", "none of this process can be read"),
        (
            {**IN_V1, "sys/fs/cgroup/memory/pod/memory.limit_in_bytes": "9223372036854771712\n"},
            "go",
            "no cgroup limits memory",
        ),
        (
            {
                **IN_V1,
                "sys/fs/cgroup/memory/pod/memory.limit_in_bytes": f"{9 * GIB}\n",
                "sys/fs/cgroup/memory/pod/memory.usage_in_bytes": f"{3 * GIB}\n",
                "sys/fs/cgroup/memory/pod/memory.stat": f"total_inactive_file {GIB}\n",
            },
            "no-go",
            "7.0 GiB that the cgroup /sys/fs/cgroup/memory/pod has left",
        ),
        (
            # a container that sees its own group as the root
            {
                **IN_V1,
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{8 * GIB + 1}\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "0\n",
            },
            "warning",
            "leave less than a tenth of the 8.0 GiB that the cgroup /sys/fs/cgroup/memory has left",
        ),
    ],
)
def test_cgroups(tmp_path: Path, files: dict[str, str | None], verdict: str, text: str) -> None:
    found = ask(CGROUP, setup(), machine(tmp_path, files))
    assert found[0] == verdict
    assert text in found[1]


def test_a_cgroup_file_that_may_not_be_read_is_as_if_it_were_not_there(tmp_path: Path) -> None:
    where = machine(tmp_path, {"sys/fs/cgroup/engine/memory.max": None})
    (tmp_path / "sys/fs/cgroup/engine/memory.max").mkdir()  # root reads files of any mode, but no folder
    assert ask(CGROUP, setup(), where)[0] == "not known"


def limits(soft: object) -> dict[str, str | None]:
    text = f"Max data size  unlimited unlimited bytes\nMax locked memory  {soft}  {soft}  bytes\n"
    return {"proc/self/limits": text}


@pytest.mark.parametrize(
    ("files", "verdict", "text"),
    [
        (limits("unlimited"), "go", "is unlimited"),
        (limits(9 * GIB), "go", "is 9.0 GiB"),
        (limits(65536), "warning", "at most 64.0 KiB may be locked, and 8.0 GiB of all ranks will be pinned"),
        (limits("plenty"), "not known", "/proc/self/limits"),
        ({"proc/self/limits": None}, "not known", "/proc/self/limits"),
    ],
)
def test_locked_memory(tmp_path: Path, files: dict[str, str | None], verdict: str, text: str) -> None:
    found = ask(LOCKED, setup(), machine(tmp_path, files, gpus=lambda: H200))
    assert found[0] == verdict
    assert text in found[1]


def test_without_a_device_that_pins_the_limit_does_not_matter(tmp_path: Path) -> None:
    where = machine(tmp_path, limits(65536))
    assert ask(LOCKED, setup(), where)[0] == "go"
    assert ask(LOCKED, setup(pins=True), where)[0] == "warning"
    assert ask(LOCKED, setup(pins=False), machine(tmp_path, gpus=lambda: H200))[0] == "go"


def test_swap(tmp_path: Path) -> None:
    on = {"proc/swaps": "Filename Type Size Used Priority\n/dev/sda2 partition 8 0 -2\n/swap file 8 0 -3\n"}
    assert ask(SWAP, setup(), machine(tmp_path))[0] == "go"
    verdict, text = ask(SWAP, setup(pins=False), machine(tmp_path, on))
    assert verdict == "warning"
    assert "(/dev/sda2, /swap): host blocks are not pinned" in text
    assert "are pinned and stay" in ask(SWAP, setup(pins=True), machine(tmp_path, on))[1]
    assert ask(SWAP, setup(), machine(tmp_path, {"proc/swaps": None}))[0] == "not known"


@pytest.mark.parametrize(
    ("free", "ranks", "verdict"),
    [(GIB, 2, "go"), (2**26, 2, "warning"), (2**26, None, "warning"), (2**26, 1, "go")],
)
def test_shared_memory(tmp_path: Path, free: int, ranks: int | None, verdict: str) -> None:
    where = machine(tmp_path, space={"/dev/shm": Space(GIB, free)}.get)
    assert ask(SHARED_MEMORY, setup(ranks=ranks), where)[0] == verdict


def test_no_shared_memory(tmp_path: Path) -> None:
    assert ask(SHARED_MEMORY, setup(), machine(tmp_path, space={}.get))[0] == "warning"


def test_a_check_that_raises_is_a_warning_and_the_others_go_on(tmp_path: Path) -> None:
    def broken(_: Setup, __: Machine) -> None:
        raise RuntimeError("out of order")

    verdict, text = ask(Check("broken", broken), setup(), machine(tmp_path))  # type: ignore[arg-type]
    assert (verdict, text) == ("warning", "the check itself failed: RuntimeError('out of order')")


@pytest.mark.parametrize(
    ("environ", "verdict"),
    [
        ({}, "go"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "go"),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, "go"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64, expandable_segments: True"}, "warning"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "warning"),
    ],
)
def test_expandable_segments_are_found_under_both_of_torchs_names(
    tmp_path: Path, environ: dict[str, str], verdict: str
) -> None:
    found = ask(SEGMENTS, setup(), machine(tmp_path, environ=environ))
    assert found[0] == verdict
    assert verdict == "go" or next(iter(environ)) in found[1]
