from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kvoffload.checks import memory
from kvoffload.checks.check import Check, Finding, Setup, fail
from kvoffload.checks.startup import examine, examine_rank, log_warnings
from kvoffload.model.config import OffloadConfig
from kvoffload.testing import FakeDevice
from kvoffload.transfer.host_memory import RESERVE, read_file
from tests.captured_logs import capture_logs
from tests.doctor.trees import GIB, Machine, machine, setup
from tests.reference.rig import rig

if TYPE_CHECKING:
    import pytest

LAYOUT = FakeDevice(9, [65536, 65536]).layout
ENOUGH = OffloadConfig(host_bytes=64 * 131072)


def warnings(
    rank: int, ranks: int, config: OffloadConfig, where: Machine, local_ranks: int | None = None
) -> list[dict[str, Any]]:
    with capture_logs() as lines, where:
        log_warnings(examine_rank(rank, ranks, config, LAYOUT, local_ranks=local_ranks))
    assert {line["log_level"] for line in lines} <= {"warning"}
    assert {line["event"] for line in lines} <= {"doctor_warning"}
    return lines


def test_each_failing_check_is_one_warning_with_stable_keys(tmp_path: Path) -> None:
    where = machine(tmp_path, {"proc/swaps": "Filename\n/dev/sda2 partition 8 0 -2\n"})
    pool, swap = warnings(0, 1, OffloadConfig(host_bytes=8 * 131072), where)
    assert set(swap) == {"event", "log_level", "check", "verdict", "finding", "remedy"}
    assert (swap["check"], swap["verdict"]) == ("swap", "warning")
    assert (pool["check"], pool["verdict"]) == ("host pool", "warning")
    assert "8 blocks on the host, 8 on the device" in pool["finding"]


def test_only_one_rank_of_a_machine_logs_warnings(tmp_path: Path) -> None:
    tight = machine(tmp_path, {"proc/meminfo": f"MemAvailable: {(RESERVE + 6 * 2**20) // 1024} kB\n"})
    config = OffloadConfig(host_bytes=8 * 2**20)
    assert [line["check"] for line in warnings(0, 2, config, tight)] == ["host memory"]
    assert warnings(1, 2, config, tight) == []
    # with one rank per machine, each machine needs half of the memory
    assert warnings(0, 2, config, tight, local_ranks=1) == []
    small = machine(tmp_path, {"proc/meminfo": f"MemAvailable: {(RESERVE + 2**21) // 1024} kB\n"})
    assert [line["check"] for line in warnings(1, 2, config, small, local_ranks=1)] == ["host memory"]


def test_a_check_that_raises_is_a_warning_and_the_other_checks_run(tmp_path: Path) -> None:
    def broken(_: Setup) -> Finding:
        raise OSError("the file is odd")

    checks = [Check("broken", broken), Check("bad", lambda *_: fail("a", "b"))]
    with capture_logs() as lines, machine(tmp_path):
        log_warnings(examine(checks, setup()))
    assert [(line["check"], line["verdict"]) for line in lines] == [("broken", "warning"), ("bad", "error")]
    assert "the file is odd" in lines[0]["finding"]


def test_a_start_without_problems_logs_nothing_and_queries_no_device_and_no_package(tmp_path: Path) -> None:
    def asked(*_: object) -> NoReturn:
        raise AssertionError("asked")

    where = machine(tmp_path, gpus=asked, version=asked, entry_points=asked, disk_usage=asked)
    assert warnings(0, 2, ENOUGH, where) == []


def test_the_checks_read_only_a_few_small_files_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    paths: list[str] = []

    def counted(path: str) -> str | None:
        paths.append(path)
        return read_file(path)

    monkeypatch.setattr(memory, "read_file", counted)
    examine_rank(0, 1, OffloadConfig(host_bytes=64 * GIB), LAYOUT)
    assert len(paths) < 60
    assert all(path.startswith(("/proc/", "/sys/")) for path in paths)


def test_the_reference_plugin_warns_and_starts() -> None:
    with capture_logs() as lines, rig("full", ranks=2, host_blocks=5, num_blocks=9) as made:
        assert made.run((1, 2, 3), 2)
    reported = [line for line in lines if line["event"] == "doctor_warning"]
    (pool,) = [line for line in reported if line["check"] == "host pool"]
    assert "5 blocks on the host, 8 on the device" in pool["finding"]
