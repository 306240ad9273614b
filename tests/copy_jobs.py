from __future__ import annotations

from collections.abc import Iterable

from kvoffload.model.ids import DeviceBlockId, JobId, RequestId, SlotId
from kvoffload.model.wire import CopyJob, DeviceJob, Direction, Tier


def device_job(
    number: int,
    direction: Direction,
    slots: Iterable[int],
    blocks: Iterable[int],
    request: RequestId | None = None,
) -> DeviceJob:
    places, targets = tuple(map(SlotId, slots)), tuple(map(DeviceBlockId, blocks))
    return CopyJob(JobId(number), direction, Tier.HOST, places, targets, request)
