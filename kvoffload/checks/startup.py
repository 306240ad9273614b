"""Runs the doctor's checks at an engine's start, on the engine's real sizes. A failing check only logs a warning."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from kvoffload.checks import memory
from kvoffload.checks.check import FAILING, Check, Finding, Setup, Sizes, run_checks
from kvoffload.logs import get_logger

if TYPE_CHECKING:
    from kvoffload.model.config import OffloadConfig
    from kvoffload.transfer.layout import DeviceLayout

log = get_logger("doctor")


def examine(checks: Iterable[Check], setup: Setup) -> list[Finding]:
    """Run checks, and return the findings that are warnings or errors."""
    return [one for one in run_checks(checks, setup) if one.verdict in FAILING]


def examine_rank(
    rank: int,
    ranks: int,
    config: OffloadConfig,
    layout: DeviceLayout,
    *,
    local_ranks: int | None = None,
    checks: Iterable[Check] = (*memory.CHECKS, memory.COPY_SPEED),
) -> list[Finding]:
    """Check the memory that a rank is about to use. The first rank on a machine checks for all ranks there.

    The checks read only small kernel files and query no device. For other ranks, the list is empty.

    Args:
        rank: the rank's number.
        ranks: the number of the engine's ranks.
        config: the operator's settings.
        layout: the layout of the rank's KV memory.
        local_ranks: the number of the engine's ranks on this machine; by default all ranks.
        checks: the checks to run.
    """
    local_ranks = local_ranks or ranks
    if rank % local_ranks:
        return []
    sizes = Sizes(
        ranks=local_ranks,
        block_bytes=layout.slot_bytes,
        page_bytes=layout.page_bytes,
        device_blocks=layout.regions[0].blocks - 1,  # without the engine's null block
    )
    config = replace(config, host_bytes=config.host_bytes // ranks * local_ranks)
    return examine(checks, Setup(config, sizes, pins=layout.device.startswith("cuda")))


def log_warnings(findings: Iterable[Finding]) -> None:
    """Log a warning per finding.

    Call this function only after the start has succeeded, because a refused start has its own error.
    """
    for one in findings:
        verdict = one.verdict.value
        log.warning("doctor_warning", check=one.check, verdict=verdict, finding=one.text, remedy=one.remedy)
