"""The doctor's checks where an engine starts, with the values that it has: warnings, once, that stop nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from kvoffload.checks import memory, numa, pools
from kvoffload.checks.check import FAILING, Answer, Check, Setup, run_checks
from kvoffload.checks.gpus import Gpus
from kvoffload.checks.machine import Machine
from kvoffload.logs import get_logger

if TYPE_CHECKING:
    from kvoffload.model.config import OffloadConfig
    from kvoffload.transfer.layout import DeviceLayout

log = get_logger("doctor")

CHECKS: tuple[Check, ...] = (*memory.CHECKS, *numa.CHECKS, *pools.CHECKS)
"""What a rank can ask of its machine and its sizes."""


def examine(checks: Iterable[Check], setup: Setup, machine: Machine | None = None) -> list[Answer]:
    """Return the answers of the checks that fail. Reads some small files of the kernel's and asks no device."""
    # The engine has its devices in use already, and the management library takes longer to load than all else here.
    at_start = replace(machine or Machine(), gpus=Gpus)
    return [one for one in run_checks(checks, setup, at_start) if one.finding.verdict in FAILING]


def examine_rank(
    rank: int,
    ranks: int,
    config: OffloadConfig,
    layout: DeviceLayout,
    *,
    local_ranks: int | None = None,
    checks: Iterable[Check] = CHECKS,
    machine: Machine | None = None,
) -> list[Answer]:
    """Examine what a rank is about to take, before it takes it; the first of a machine speaks for all of them.

    Args:
        rank: whose.
        ranks: of the engine.
        config: the operator's settings.
        layout: the rank's KV memory.
        local_ranks: of the engine on this machine; by default all.
        checks: which of them.
        machine: where it runs; by default here.
    """
    local_ranks = local_ranks or ranks
    if rank % local_ranks:
        return []
    setup = Setup(
        config=replace(config, host_bytes_per_rank=config.bytes_per_rank(ranks)),
        ranks=local_ranks,
        device_blocks=layout.regions[0].blocks - 1,  # an engine's null block is nobody's
        page_bytes=tuple(region.page_bytes for region in layout.regions),
        block_bytes=layout.slot_bytes,
        pins=layout.device.startswith("cuda"),
    )
    return examine(checks, setup, machine)


def warn(answers: Iterable[Answer]) -> None:
    """Log one warning for each. Called when the start has succeeded: one that is refused says itself why."""
    for answer in answers:
        log.warning(
            "doctor_warning",
            check=answer.check,
            verdict=answer.finding.verdict.value,
            finding=answer.finding.text,
            remedy=answer.finding.remedy,
        )
