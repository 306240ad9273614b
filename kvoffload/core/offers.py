"""Offers: computed blocks that may be stored. Store planners consume these and never see a block table."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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


# Once a block: a named tuple's own call takes three times as long.
offer_of: Callable[[tuple[BlockKey, DeviceBlockId, RequestId | None, int, GroupId, int]], Offer] = partial(
    tuple.__new__, Offer
)
"""Make an offer of all its fields."""
