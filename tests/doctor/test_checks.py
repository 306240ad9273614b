from __future__ import annotations

import asyncio
import ctypes
import os
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.checks import memory, outputs
from kvoffload.checks.check import Sizes, run_checks
from kvoffload.checks.gpus import Gpus, find_gpus
from kvoffload.model.config import size_text
from kvoffload.model.errors import ConfigError
from kvoffload.telemetry.journal import JournalFile
from kvoffload.testing import FakeDevice
from kvoffload.transfer.arena import CHUNK_BYTES, Arena
from kvoffload.transfer.host_memory import RESERVE, HostChunk, slots_for
from tests.cuda_emulator import build
from tests.doctor.trees import GIB, Machine, ask, machine, setup
from tests.tooling.scripts import ROOT

KIB = 1024
H200 = Gpus(("H200",), 12080)
IN_V1 = {
    "proc/self/cgroup": "4:memory:/pod/engine\n3:cpu:/x\n0::/\n",
    "sys/fs/cgroup/engine/memory.max": None,
}


class Recorder:
    """Records the requested sizes without allocating memory."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    async def allocate(self, size: int, first: int = 0) -> HostChunk:
        self.sizes.append(size)
        return HostChunk(4096, size, lambda: None)


@given(st.lists(st.integers(1, 70000), min_size=1, max_size=4), st.integers(0, 5 * CHUNK_BYTES // 2))
def test_the_expected_host_memory_equals_what_the_arena_allocates(pages: list[int], share: int) -> None:
    """The sizes are equal except for the padding that aligns regions to cache lines."""
    layout = FakeDevice(1, pages).layout
    asked = Recorder()
    asyncio.run(Arena(layout, share // layout.slot_bytes, asked).prepare())
    sizes = Sizes(block_bytes=layout.slot_bytes, page_bytes=tuple(pages))
    needed = memory.needed_bytes(setup(host_bytes=share, sizes=sizes))
    assert 0 <= sum(asked.sizes) - needed <= 64 * len(pages) * len(asked.sizes)


@pytest.mark.parametrize(
    ("sizes", "needed"),
    [
        (Sizes(), 2 * 4096),
        (Sizes(ranks=3), 2 * 4096 - 2),  # three ranks cannot share the last two bytes
        (Sizes(ranks=2, block_bytes=4096), 2 * 4096),
        # Each rank can use only whole blocks.
        (Sizes(ranks=2, block_bytes=3, page_bytes=(1, 1, 1)), 2 * 4095),
    ],
)
def test_the_required_memory_covers_all_ranks(sizes: Sizes, needed: int) -> None:
    assert memory.needed_bytes(setup(host_bytes=2 * 4096, sizes=sizes)) == needed


@given(
    pages=st.lists(st.integers(1, 70000), min_size=1, max_size=3),
    share=st.integers(0, 2**28),
    ranks=st.integers(1, 4),
    above=st.integers(-9, 9),
)
def test_property_a_start_is_refused_where_the_check_says_error(
    pages: list[int], share: int, ranks: int, above: int
) -> None:
    """The available memory is within a few KiB of the required memory, where rounding matters."""
    layout, share = FakeDevice(1, pages).layout, share + sum(pages)
    left = (RESERVE + ranks * share) // 1024 + above
    read = {"/proc/meminfo": f"MemAvailable: {left} kB\n"}.get
    sizes = Sizes(ranks, layout.slot_bytes, tuple(pages))
    with patch.object(memory, "read_file", read):
        (answer,) = run_checks(memory.CHECKS[:1], setup(host_bytes=share * ranks, sizes=sizes))
    is_granted = True
    try:
        slots_for(share, layout, ranks=ranks, read=read)
    except ConfigError:
        is_granted = False
    assert is_granted is (answer.verdict != "error"), answer


@pytest.mark.parametrize(
    ("files", "host_gib", "verdict", "text"),
    [
        ({}, 80, "ok", "80.0 GiB fit the 100.0 GiB that the machine has left now"),
        ({}, 95, "warning", "95.0 GiB leave less than a tenth of the 100.0 GiB that the machine has left"),
        ({}, 101, "error", "101.0 GiB are too much for the 100.0 GiB that the machine has left"),
        ({}, 100, "error", "now: 256.0 MiB must stay free"),
        ({"proc/meminfo": "MemAvailable: lots kB\n"}, 8, "unknown", "/proc/meminfo cannot be read"),
        (
            {"sys/fs/cgroup/engine/memory.max": f"{16 * GIB}\n"},
            8,
            "ok",
            "8.0 GiB fit the 16.0 GiB that the cgroup /sys/fs/cgroup/engine has left now",
        ),
        (
            # The parent cgroup allows less memory than its child, and part of the used memory is page cache.
            {
                "proc/self/cgroup": "0::/pod/engine\n",
                "sys/fs/cgroup/pod/engine/memory.max": f"{16 * GIB}\n",
                "sys/fs/cgroup/pod/engine/memory.current": "0\n",
                "sys/fs/cgroup/pod/memory.max": f"{6 * GIB}\n",
                "sys/fs/cgroup/pod/memory.current": f"{2 * GIB}\n",
                "sys/fs/cgroup/pod/memory.stat": f"anon 5\ninactive_file {GIB}\n",
            },
            8,
            "error",
            "8.0 GiB are too much for the 5.0 GiB that the cgroup /sys/fs/cgroup/pod has left",
        ),
        (
            {
                **IN_V1,
                "sys/fs/cgroup/memory/pod/memory.limit_in_bytes": f"{9 * GIB}\n",
                "sys/fs/cgroup/memory/pod/memory.usage_in_bytes": f"{3 * GIB}\n",
                "sys/fs/cgroup/memory/pod/memory.stat": f"total_inactive_file {GIB}\n",
            },
            8,
            "error",
            "7.0 GiB that the cgroup /sys/fs/cgroup/memory/pod has left",
        ),
        (
            {**IN_V1, "sys/fs/cgroup/memory/pod/memory.limit_in_bytes": "9223372036854771712\n"},
            8,
            "ok",
            "the machine",
        ),
        # A limit that cannot be read counts as no limit, as it does at the engine's start.
        ({"sys/fs/cgroup/engine/memory.max": "x\n"}, 8, "ok", "the machine"),
        ({"proc/self/cgroup": "nonsense\n0:\n\n::::\n"}, 8, "ok", "the machine"),
    ],
)
def test_host_memory(
    tmp_path: Path, files: dict[str, str | None], host_gib: int, verdict: str, text: str
) -> None:
    found = ask(memory.CHECKS, "host memory", setup(host_bytes=host_gib * GIB), machine(tmp_path, files))
    assert found[0] == verdict
    assert text in found[1]


@pytest.mark.parametrize(
    ("limit", "pins", "verdict"),
    [(-1, True, "ok"), (9 * GIB, True, "ok"), (65536, True, "warning"), (65536, False, "ok")],
)
def test_locked_memory(tmp_path: Path, limit: int, pins: bool, verdict: str) -> None:
    where = machine(tmp_path, getrlimit=lambda _: (limit, limit))
    assert ask(memory.CHECKS, "locked memory", setup(pins=pins), where)[0] == verdict


def test_swap(tmp_path: Path) -> None:
    on = {"proc/swaps": "Filename Type Size Used Priority\n/dev/sda2 partition 8 0 -2\n/swap file 8 0 -3\n"}
    assert ask(memory.CHECKS, "swap", setup(), machine(tmp_path))[0] == "ok"
    verdict, text = ask(memory.CHECKS, "swap", setup(), machine(tmp_path, on))
    assert verdict == "warning"
    assert "(/dev/sda2, /swap): host blocks, which are not pinned" in text
    assert "the engine's own memory" in ask(memory.CHECKS, "swap", setup(pins=True), machine(tmp_path, on))[1]


@pytest.mark.parametrize(
    ("block", "device", "policy", "verdict", "text"),
    [
        (GIB, None, "eager", "unknown", "whether the host holds more"),
        (None, 4, "eager", "unknown", "whether the host holds more"),
        (GIB, 4, "eager", "warning", "4 blocks on the host, 4 on the device: "),
        (GIB, 4, "lazy", "ok", "4 blocks on the host, 4 on the device, 1.0 times as many"),
        (GIB, 4, "auto", "ok", "1.0 times as many"),
        (GIB // 3, 8, "eager", "warning", "12 blocks on the host, 8 on the device"),
        (4 * GIB // 13, 8, "eager", "ok", "13 blocks on the host, 8 on the device, 1.6 times as many"),
        (GIB, 2, "eager", "ok", "2.0 times as many"),
        (5 * GIB, 2, "lazy", "error", "one block takes 5.0 GiB"),
    ],
)
def test_host_pool(
    tmp_path: Path, block: int | None, device: int | None, policy: str, verdict: str, text: str
) -> None:
    known = setup(host_bytes=8 * GIB, store_policy=policy, sizes=Sizes(2, block, (), device))
    found = ask(memory.CHECKS, "host pool", known, machine(tmp_path))
    assert found[0] == verdict
    assert text in found[1]


@pytest.mark.parametrize(
    ("shares", "verdict", "text"), [(True, "ok", "8 blocks"), (False, "warning", "4 blocks")]
)
def test_the_host_pool_counts_a_block_once_for_ranks_that_share_a_copy(
    tmp_path: Path, shares: bool, verdict: str, text: str
) -> None:
    sizes = Sizes(2, GIB, (), 4, sharers=2)
    known = setup(host_bytes=8 * GIB, host_share=shares, sizes=sizes)
    found = ask(memory.CHECKS, "host pool", known, machine(tmp_path))
    assert found[0] == verdict
    assert f"{text} on the host, 4 on the device" in found[1]
    assert ("host_copies 1: 2 ranks share one" in found[1]) is shares


@pytest.mark.parametrize(
    ("tier", "policy"), [({}, "auto (lazy with recurrent layers)"), ({"disk_path": Path("disk")}, "lazy")]
)
def test_the_remedy_for_a_small_host_is_a_policy_that_works_there(tier: dict[str, Any], policy: str) -> None:
    known = setup(host_bytes=8 * GIB, sizes=Sizes(2, GIB, (), 4), **tier)
    (found,) = [one for one in run_checks(memory.CHECKS, known) if one.check == "host pool"]
    assert found.remedy.endswith(f"or set store_policy to {policy}")


ON_DISK = {"disk_path": Path("disk"), "disk_bytes": GIB}


@pytest.mark.parametrize(
    ("tier", "host", "device", "expected"),
    [
        ({}, 8 * GIB, 5, ""),
        (ON_DISK, 8 * GIB, None, ""),
        (ON_DISK, GIB, 5, ""),
        (ON_DISK, 8 * GIB, 4, "ok: "),
        (ON_DISK, 8 * GIB, 5, "warning: a prompt with more than 4 blocks does not fit host memory"),
        ({"remote_url": "s3://bucket/prefix"}, 8 * GIB, 5, "warning: a prompt with more than 4 blocks"),
    ],
)
def test_longest_prefix(tier: dict[str, Any], host: int, device: int | None, expected: str) -> None:
    known = setup(host_bytes=host, sizes=Sizes(2, GIB, (), device), **tier)
    found = run_checks([memory.LONGEST_PREFIX], known)
    assert "".join([f"{one.verdict}: {one.text}" for one in found]).startswith(expected)
    assert bool(found) is bool(expected)


@pytest.mark.parametrize(
    ("device", "policy", "verdict", "text"),
    [
        (
            50 * GIB,
            "eager",
            "warning",
            "512.0 MiB on the host, 50.0 GiB on the device, on each rank (by bytes)",
        ),
        (50 * GIB, "lazy", "ok", "0.0 times as many"),
        (GIB // 4, "eager", "ok", "2.0 times as many"),
        (None, "eager", "unknown", "whether the host holds more"),
    ],
)
def test_without_a_blocks_size_host_and_device_are_compared_by_bytes(
    tmp_path: Path, device: int | None, policy: str, verdict: str, text: str
) -> None:
    known = setup(host_bytes=GIB, store_policy=policy, sizes=Sizes(2, device_bytes=device))
    found = ask(memory.CHECKS, "host pool", known, machine(tmp_path))
    assert (found[0], text in found[1]) == (verdict, True), found


@pytest.mark.parametrize(
    ("pages", "verdict", "text"),
    [
        ((2048 * KIB,), "ok", "about 0.85 of"),
        ((64 * KIB,) * 8, "ok", "pages of 64.0 KiB: scattered blocks are copied at about 0.8 of"),
        ((64 * KIB - 1,), "warning", "about 0.5 of"),
        ((4 * KIB - 1,), "warning", "less than 0.5 of"),
        ((4 * KIB, 4 * KIB, 2048 * KIB), "warning", "pages of 4.0 KiB"),
    ],
)
def test_copy_speed(tmp_path: Path, pages: tuple[int, ...], verdict: str, text: str) -> None:
    known = setup(sizes=Sizes(page_bytes=pages))
    found = ask((memory.COPY_SPEED,), "copy speed", known, machine(tmp_path))
    assert found[0] == verdict
    assert text in found[1]


def test_the_reported_speeds_are_the_measured_ones() -> None:
    text = (ROOT / "tests/bench/README.md").read_text(encoding="utf-8")
    ascending = sorted(memory.SPEEDS)
    assert ", ".join(f"{share} at {size_text(size).replace('.0', '')}" for size, share in ascending) in text


@pytest.mark.parametrize(
    ("found", "verdict", "text"),
    [
        (H200, "ok", "1 H200; a driver for CUDA 12.8"),
        (Gpus(("A", "B", "A"), 13000), "ok", "2 A, 1 B; a driver for CUDA 13.0"),
        (Gpus(("H200",), 12040), "warning", "for CUDA 12.4: every block"),
        (Gpus(), "ok", "no NVIDIA GPU is visible here"),
        (replace(H200, can_register=False), "error", "its driver registers no host memory"),
    ],
)
def test_gpu(tmp_path: Path, found: Gpus, verdict: str, text: str) -> None:
    answer = ask(memory.GPUS, "gpu", setup(), machine(tmp_path, gpus=lambda: found))
    assert answer[0] == verdict
    assert text in answer[1]


@pytest.mark.parametrize(
    ("processors", "verdict"), [(f"{min(os.sched_getaffinity(0))}\n", "ok"), ("100000\n", "warning")]
)
def test_memory_node(tmp_path: Path, processors: str, verdict: str) -> None:
    """The second GPU's node is unknown, as on a machine with one node."""
    files = {
        "sys/bus/pci/devices/0000:3b:00.0/numa_node": "1\n",
        "sys/bus/pci/devices/0000:3c:00.0/numa_node": "-1\n",
        "sys/devices/system/node/node1/cpulist": processors,
    }
    gpus = replace(H200, addresses=("0000:3B:00.0", "0000:3C:00.0"))
    answer = ask(memory.GPUS, "memory node", setup(), machine(tmp_path, files, gpus=lambda: gpus))
    assert answer[0] == verdict
    assert ("NUMA node of 0000:3B:00.0: copies" in answer[1]) is (verdict == "warning")


@pytest.mark.parametrize(
    ("modes", "verdict"),
    [("always [madvise] never\n", "ok"), ("always madvise [never]\n", "warning"), (None, "ok")],
)
def test_huge_pages(tmp_path: Path, modes: str | None, verdict: str) -> None:
    files = {"sys/kernel/mm/transparent_hugepage/enabled": modes}
    assert ask(memory.CHECKS, "huge pages", setup(), machine(tmp_path, files))[0] == verdict


def test_without_the_driver_there_is_no_gpu_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    libc = ctypes.CDLL("libc.so.6")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: libc)
    assert find_gpus.__wrapped__() == Gpus()


def test_gpus_are_read_from_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    library = ctypes.CDLL(str(build()))
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    found = find_gpus.__wrapped__()
    assert found.names[:2] == ("emulated device 0", "emulated device 1")
    assert found.addresses[:2] == ("0000:3B:00.0", "0000:3C:00.0")
    assert found.cuda == 13000


@pytest.mark.gpu
def test_gpus_are_found() -> None:
    found = find_gpus()
    assert found.names
    assert found.cuda > 11000


def of_disk(name: str, where: Machine, path: Path) -> tuple[str, str]:
    return ask(outputs.CHECKS, name, setup(disk_path=path, disk_bytes=GIB), where)


def test_features_that_are_off_are_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", raising=False)
    with machine(tmp_path):
        assert run_checks([*outputs.CHECKS, *memory.GPUS[1:]], setup()) == []


@pytest.mark.parametrize(
    ("free", "left", "verdict"), [(0, 0, "ok"), (2**20, 0, "warning"), (2**20, 2**20, "ok")]
)
def test_disk_bytes_must_be_free_or_belong_to_an_earlier_engine(
    tmp_path: Path, free: int, left: int, verdict: str
) -> None:
    folder = tmp_path / "disk" / "aaaa" / "replica0"
    folder.mkdir(parents=True)
    (folder / "slots0").write_bytes(b"\1" * left)
    where = machine(tmp_path, disk_usage=lambda _: SimpleNamespace(free=GIB - free))
    assert of_disk("disk space", where, tmp_path / "disk")[0] == verdict


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("tmpfs", "it is on tmpfs, which is memory"),
        ("nfs4", "over a network"),
        ("fuse.sshfs", "over a network"),
    ],
)
def test_a_disk_that_is_memory_or_a_network_is_a_warning(tmp_path: Path, kind: str, text: str) -> None:
    table = (
        f"1 0 8:1 / / rw - btrfs /dev/a rw\n2 1 8:2 / {tmp_path} rw,relatime shared:1 - {kind} /dev/b rw\n"
    )
    where = machine(tmp_path / "machine", {"proc/self/mountinfo": table})
    verdict, found = of_disk("disk folder", where, tmp_path / "not" / "there")
    assert verdict == "warning"
    assert text in found


def test_the_disks_folder_is_tried_and_no_file_is_left(tmp_path: Path) -> None:
    where = machine(tmp_path / "machine", {"proc/self/mountinfo": "1 0 8:1 / / rw - ext4 /dev/a rw\n"})
    verdict, text = of_disk("disk folder", where, tmp_path / "disk" / "new")
    is_direct = "it is on ext4, and direct I/O works" in text
    # the file system may not support direct I/O
    assert is_direct or "through the page cache (direct I/O: " in text
    assert verdict == ("ok" if is_direct else "warning")
    assert [one.name for one in tmp_path.iterdir()] == ["machine"]


def test_a_disk_that_others_can_replace_or_that_is_read_only_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_to_all = tmp_path / "disk"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    assert "every user may rename" in of_disk("disk folder", machine(tmp_path), open_to_all)[1]

    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    found = of_disk("disk folder", machine(tmp_path), tmp_path)
    assert found == ("warning", f"{tmp_path} cannot be written: Permission denied")


def test_a_disk_that_cannot_be_looked_up_is_a_warning_that_says_why(tmp_path: Path) -> None:
    for name in ("disk space", "disk folder"):
        verdict, text = of_disk(name, machine(tmp_path / name), tmp_path / ("long" * 99))
        assert (verdict, "cannot be used: File name too long" in text) == ("warning", True)


def of_journal(path: Path, tmp_path: Path) -> tuple[str, str]:
    return ask(outputs.CHECKS, "journal", setup(journal_path=path), machine(tmp_path / "machine"))


def test_a_journal_is_tried_and_stays_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    assert of_journal(path, tmp_path) == ("ok", str(path))
    assert not path.exists()
    path.write_text("a line\n")
    path.chmod(0o640)
    assert of_journal(path, tmp_path)[0] == "ok"
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("a line\n", 0o640)


def test_a_journal_that_a_start_would_refuse_is_an_error(tmp_path: Path) -> None:
    open_one = JournalFile(tmp_path / "open")
    try:
        for name, reason in (
            ("none/journal", "No such file"),
            ("open", "another process writes it"),
            ("long" * 99, "File name too long"),
        ):
            verdict, text = of_journal(tmp_path / name, tmp_path)
            assert verdict == "error"
            assert reason in text
    finally:
        open_one.close()


@pytest.mark.parametrize("in_environment", [False, True])
def test_a_collector_that_does_not_answer_is_a_warning(
    in_environment: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        if in_environment:
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", address)
        known = setup() if in_environment else setup(otlp_endpoint=f"http://{address}/v1/traces")
        found = ask(outputs.CHECKS, "span collector", known, machine(tmp_path))
        assert found == ("ok", f"{address} answers")
    verdict, text = ask(outputs.CHECKS, "span collector", known, machine(tmp_path))
    assert verdict == "warning"
    assert "nothing answers" in text


def test_spans_without_their_packages_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name="opentelemetry")

    monkeypatch.setattr("kvoffload.telemetry.spans.import_module", missing)
    known = setup(otlp_endpoint="http://localhost:4318/v1/traces")
    assert ask(outputs.CHECKS, "span collector", known, machine(tmp_path))[0] == "error"
