"""Offers: computed blocks that may be stored. Store planners consume these and never see a block table."""

from __future__ import annotations

from typing import NamedTuple

from kvoffload.model.ids import BlockKey, DeviceBlockId, GroupId, RequestId


class Offer(NamedTuple):
    """One computed block.

    `request` is None where the device's own free queue offers it (lazy), and the place in the request's table is then
    meaningless.
    """

    key: BlockKey
    block: DeviceBlockId
    request: RequestId | None = None
    incarnation: int = 0
    group: GroupId = GroupId(0)
    position: int = 0
