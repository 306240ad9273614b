"""The doctor's checks at an engine's start, with the engine's own numbers. They log warnings and stop nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from kvoffload.checks import memory
from kvoffload.checks.check import FAILING, Answer, Check, Setup, Sizes, run_checks
from kvoffload.checks.machine import Machine
from kvoffload.logs import get_logger

if TYPE_CHECKING:
    from kvoffload.model.config import OffloadConfig
    from kvoffload.transfer.layout import DeviceLayout

log = get_logger("doctor")


def examine(checks: Iterable[Check], setup: Setup, machine: Machine | None = None) -> list[Answer]:
    """Return the answers of the checks that fail."""
    answers = run_checks(checks, setup, machine or Machine())
    return [one for one in answers if one.finding.verdict in FAILING]


def examine_rank(
    rank: int,
    ranks: int,
    config: OffloadConfig,
    layout: DeviceLayout,
    *,
    local_ranks: int | None = None,
    checks: Iterable[Check] = (*memory.CHECKS, memory.COPY_SPEED),
    machine: Machine | None = None,
) -> list[Answer]:
    """Check the memory that a rank is about to use. The first rank of a machine checks for all of them.

    Reads small files of the kernel, and queries no device.

    Args:
        rank: its number.
        ranks: of the engine.
        config: the operator's settings.
        layout: the rank's KV memory.
        local_ranks: of the engine on this machine; by default all.
        checks: the checks to run.
        machine: by default this one.
    """
    local_ranks = local_ranks or ranks
    if rank % local_ranks:
        return []
    sizes = Sizes(
        ranks=local_ranks,
        block_bytes=layout.slot_bytes,
        page_bytes=tuple(region.page_bytes for region in layout.regions),
        device_blocks=layout.regions[0].blocks - 1,  # without the engine's null block
    )
    config = replace(config, host_bytes=config.host_bytes // ranks * local_ranks)
    return examine(checks, Setup(config, sizes, pins=layout.device.startswith("cuda")), machine)


def warn(answers: Iterable[Answer]) -> None:
    """Log one warning for each, after the start has succeeded: a refused start has its own error."""
    for answer in answers:
        log.warning(
            "doctor_warning",
            check=answer.check,
            verdict=answer.finding.verdict.value,
            finding=answer.finding.text,
            remedy=answer.finding.remedy,
        )
