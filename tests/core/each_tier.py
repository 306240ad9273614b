"""Tests of every lower tier, and of prefixes that are long for the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvoffload.model.causes import MissCause
from kvoffload.model.events import TierCopyScheduled
from kvoffload.model.groups import GroupSpec
from tests.core.disk_world import DiskWorld
from tests.core.lower_world import LOAD, LowerWorld
from tests.core.remote_world import RemoteWorld
from tests.core.world import Req

CAUSES = {DiskWorld: MissCause.ON_DISK, RemoteWorld: MissCause.IN_REMOTE}

Kind = type[DiskWorld] | type[RemoteWorld]
on_each_tier = pytest.mark.parametrize("kind", CAUSES)

LONG = "".join(map(chr, range(33, 33 + 85)))
"""21 blocks and a token."""


def next_engine(
    kind: Kind,
    *texts: str,
    host: int,
    blocks: int = 64,
    groups: Sequence[GroupSpec] = (),
    **settings: Any,  # noqa: ANN401  # the world's own
) -> LowerWorld:
    """Return an engine with an empty host. Another engine has left these texts on the tier."""
    sizes: dict[str, Any] = {"disk": blocks} if kind is DiskWorld else {"hints": blocks}
    first = kind(*groups, host=blocks, device=blocks, ranks=settings.get("ranks", 1), **sizes)
    for text in texts:
        first.serve_twice(text)
    left: dict[str, Any] = {"before": first} if isinstance(first, DiskWorld) else {"store": first.store}
    return kind(*groups, host=host, device=blocks, **settings, **sizes, **left)


def rounds(world: LowerWorld) -> list[int]:
    """Return how many blocks each fetch was planned for."""
    return [each.blocks for each in world.reported(TierCopyScheduled) if each.direction is LOAD]


def wait_for_rounds(world: LowerWorld, request: Req) -> Req:
    """Look up a request and end the fetches, until the request is admitted; return the request."""
    while world.admit(request) is None:
        world.copy_all()
    return request
