"""The doctor's checks at an engine's start, with the engine's own numbers. They log warnings and stop nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from kvoffload.checks import memory
from kvoffload.checks.check import FAILING, Check, Finding, Setup, Sizes, run_checks
from kvoffload.logs import get_logger

if TYPE_CHECKING:
    from kvoffload.model.config import OffloadConfig
    from kvoffload.transfer.layout import DeviceLayout

log = get_logger("doctor")


def examine(checks: Iterable[Check], setup: Setup) -> list[Finding]:
    """Return the findings of the checks that fail."""
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
    """Check the memory that a rank is about to use. The first rank of a machine checks for all of them.

    Reads small files of the kernel, and queries no device.

    Args:
        rank: its number.
        ranks: of the engine.
        config: the operator's settings.
        layout: the rank's KV memory.
        local_ranks: of the engine on this machine; by default all.
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
    """Log one warning for each, after the start has succeeded: a refused start has its own error."""
    for one in findings:
        verdict = one.verdict.value
        log.warning("doctor_warning", check=one.check, verdict=verdict, finding=one.text, remedy=one.remedy)
