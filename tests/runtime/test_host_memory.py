"""Metrics of host memory and of the settings."""

from __future__ import annotations

from kvoffload.model.ids import BlockKey, Rank
from kvoffload.model.wire import TransferReport
from tests.runtime.parts import Side
from tests.settings import make_config


def host_bytes(side: Side) -> dict[str, float]:
    series = side.side.gauges()["kvoffload_host_bytes"]
    return {labels[0]: number for labels, number in series.items()}


def test_bytes_of_all_ranks_are_added_up_while_memory_is_made_ready() -> None:
    side = Side(ranks=2, slots=0)
    assert host_bytes(side) == {"wanted": 0, "reserved": 0, "used": 0}
    side.side.reported([report(0, ready=2, growing=True), report(1, ready=3, growing=True)])
    assert host_bytes(side) == {"wanted": 2000, "reserved": 500, "used": 0}
    side.side.reported([report(0, ready=10), report(1, ready=10)])
    assert host_bytes(side) == {"wanted": 2000, "reserved": 2000, "used": 0}
    side.side.core.state.pool.reserve([BlockKey(bytes([number])) for number in range(3)])
    assert host_bytes(side)["used"] == 3 * 200


def test_info_carries_versions_and_settings() -> None:
    side = Side(config=make_config(verify="sample", min_load_tokens="auto"))
    ((labels, number),) = side.side.gauges()["kvoffload_info"].items()
    assert number == 1
    assert labels[1:] == ("unknown", "unknown", "eager", "sample", "auto")


def report(rank: int, *, ready: int, growing: bool = False) -> TransferReport:
    return TransferReport(Rank(rank), (), ready, is_growing=growing, slot_bytes=100, wanted_slots=10)
