from __future__ import annotations

import gc
import logging
import threading
from typing import Any

import pytest

from kvoffload.engine import Engine
from kvoffload.model.engine import Promises
from kvoffload.model.errors import ConfigError
from kvoffload_reference.plugin import ReferencePlugin
from tests.reference.rig import KINDS, config_of, on_host_only, rig, slot_bytes, text

PATIENCE_S = 30

# -- the portal's thread dies -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_continues_without_the_portals_thread(kind: str) -> None:
    with rig(kind) as made:
        on_host_only(made, text(1, 25))
        made.portal.is_dead = True
        for seed in (1, 2):
            stream = made.submit(text(seed, 25), 3)
            for _ in range(100):
                if made.engine.has_work:
                    made.engine.step()
                    made.check()
            assert stream.request_id not in made.engine._open
            assert not made.engine.has_work
        made.assert_outputs()
        made.assert_clean()
        assert made.count("load_blocks", "loaded") > 0
        assert made.count("store_blocks", "failed") > 0
        assert made.workers[0].pump._gone
        made.portal.is_dead = False


# -- a failed start ---------------------------------------------------------------------------------------------

BAD: list[tuple[dict[str, object], str]] = [
    ({"host_byte": 5, "store_policy": "soon"}, "store_policy is 'soon'.*did you mean host_bytes"),
    ({"host_bytes": slot_bytes("full") - 1}, "below one block"),
    ({"host_bytes": 2**60}, "above"),
    ({"journal_path": "/proc/nowhere/journal"}, "journal_path"),
    ({"verify": "full"}, "verify is 'full'.*let the engine recompute"),
]


@pytest.mark.parametrize(("settings", "problem"), BAD)
def test_bad_settings_stop_the_start_with_one_error_and_leave_nothing_running(
    settings: dict[str, object], problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = set(threading.enumerate())
    plugin = ReferencePlugin(promises=Promises(recovers_loads=False))
    with pytest.raises(ConfigError, match=problem):
        Engine(config_of("full", extra=settings), plugin, clock=lambda: 0.0)
    assert_no_threads_but(before)
    gc.collect()  # this would report a task that was left pending
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def assert_no_threads_but(before: set[threading.Thread]) -> None:
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), thread


def test_a_second_rank_that_cannot_start_stops_the_first() -> None:
    before = set(threading.enumerate())

    class Second(ReferencePlugin):
        def worker_side(self, engine: Any, rank: int) -> Any:  # noqa: ANN401
            if rank == 1:
                raise ConfigError(["no second rank"])
            return super().worker_side(engine, rank)

    plugin = Second()
    with pytest.raises(ConfigError, match="no second rank"):
        Engine(config_of("full", ranks=2), plugin, clock=lambda: 0.0)
    assert plugin.workers[0]._pump is None
    assert_no_threads_but(before)
