"""Runs some of the doctor's checks when an engine starts, with the engine's real sizes. Problems are only logged."""

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
    sharers: int = 1,
    checks: Iterable[Check] = (*memory.CHECKS, memory.COPY_SPEED),
) -> list[Finding]:
    """Check the host memory that this rank is about to use, and return the warnings and errors.

    Only the first rank on each machine runs the checks, for all ranks there; the other ranks get an empty list.
    The checks read small kernel files and do not query a device.

    Args:
        rank: the rank's number.
        ranks: the number of the engine's ranks.
        config: the operator's settings.
        layout: the layout of the rank's KV memory.
        local_ranks: how many of the engine's ranks run on this machine; by default all of them.
        sharers: how many ranks share one copy of their blocks.
        checks: the checks to run.
    """
    local_ranks = local_ranks or ranks
    if rank % local_ranks:
        return []
    if config.host_path is not None:
        # Other ranks may have taken over an earlier engine's files by now. The start itself compares exactly.
        checks = [one for one in checks if one not in (memory.HOST_MEMORY, memory.HOST_PATH)]
    sizes = Sizes(
        ranks=local_ranks,
        block_bytes=layout.slot_bytes,
        page_bytes=layout.page_bytes,
        device_blocks=layout.regions[0].blocks - 1,  # the engine's null block is not counted
        sharers=sharers,
    )
    config = replace(config, host_bytes=config.host_bytes // ranks * local_ranks)
    return examine(checks, Setup(config, sizes, pins=layout.device.startswith("cuda")))


def log_warnings(findings: Iterable[Finding]) -> None:
    """Log a warning for each finding.

    Call this function only after the engine has started, because a failed start already reports its error.
    """
    for one in findings:
        verdict = one.verdict.value
        log.warning("doctor_warning", check=one.check, verdict=verdict, finding=one.text, remedy=one.remedy)
