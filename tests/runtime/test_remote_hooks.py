"""The calls that an idle store adds to a step. `tests/core/test_remote.py` tests a lost store."""

from __future__ import annotations

from unittest.mock import patch

from kvoffload.model.wire import Tier
from kvoffload.remote.address import MooncakeAddress, RemotePlace
from kvoffload.telemetry.catalogue import TierState, tier_state
from tests.operations import calls
from tests.remote.fake_store import FakeStore
from tests.runtime.parts import Side


def test_a_step_without_an_answer_does_not_poll_a_store() -> None:
    store = RemotePlace(MooncakeAddress("nowhere", 1), lambda: "print")
    with patch("kvoffload.runtime.remote_catalog.open_store", lambda *_: FakeStore()):
        plain, shared = Side(portal=True), Side(portal=True, remote=store)
    for side in (plain, shared):
        for number in range(4):  # probes the store, then reads its generation
            side.side.lookup(side.seen(f"{number}"), 0)
            side.allocated(f"{number}")
            side.step()
            side.ended(f"{number}")
            side.step()
    assert tier_state(shared.side, Tier.REMOTE) is TierState.OPEN
    without = calls(plain.step)
    assert calls(shared.step) == without
    shared.clock.jump(1)
    assert calls(shared.step) > without  # the tier checks its time limits in each step
    for side in (plain, shared):
        side.close()
