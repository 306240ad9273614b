"""`verify` on an engine that cannot recover a load: what a lookup found is read before it is promised, on every rank."""

from __future__ import annotations

from functools import partial

import pytest

from kvoffload.model.engine import Promises
from tests.reference import rig as rigs
from tests.reference.rig import KINDS, Rig, on_host_only, text
from tests.reference.test_integrity import (
    PROMPT,
    flip,
    interrupt_reading,
    lose_reading,
    read_without_portal,
    reload,
    spoil,
)

rig = partial(rigs.rig, promises=Promises(recovers_loads=False))
"""The reference engine recovers any load; here offloading may not count on it, so that one which fails fails the test."""


def lost_loads(made: Rig) -> int:
    return sum(made.count("load_blocks", outcome) for outcome in ("failed", "corrupt", "abandoned"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_flipped_bit_is_found_before_anything_is_promised(kind: str, ranks: int) -> None:
    with rig(kind, ranks=ranks, extra={"verify": "full"}) as made:
        on_host_only(made, PROMPT)
        slots = reload(made)
        assert made.count("load_blocks", "loaded") == len(slots) > 1
        assert made.count("transfers", "host", "check", "done") == ranks
        flip(made, slots[-1], ranks - 1)
        reload(made)
        assert made.count("transfers", "host", "check", "corrupt") == 1
        assert made.count("evicted_blocks", "host", "corrupt") == 1
        assert made.offload.gauges().slots["quarantined"] == 1
        assert lost_loads(made) == 0
        made.assert_outputs()
        made.assert_clean()


def test_where_all_has_rotted_all_is_computed() -> None:
    with rig(extra={"verify": "sample"}) as made:
        on_host_only(made, PROMPT)
        slots = reload(made)
        loaded = made.count("load_blocks", "loaded")
        spoil(made, slots)
        reload(made)
        assert made.count("miss_blocks", "corrupt") == 1
        assert made.count("load_blocks", "loaded") == loaded
        assert lost_loads(made) == 0
        made.assert_clean()


def test_requests_of_one_prefix_wait_for_one_check_and_one_load() -> None:
    with rig(extra={"verify": "full"}) as made:
        on_host_only(made, PROMPT)
        before = made.count("transfers", "host", "load", "done")
        made.run_requests(PROMPT, PROMPT, PROMPT)
        made.drain()
        assert made.count("transfers", "host", "check", "done") == 1
        assert made.count("transfers", "host", "load", "done") - before == 1
        made.assert_outputs()
        made.assert_clean()


def test_others_run_while_one_waits_for_its_check() -> None:
    with rig(extra={"verify": "full"}) as made:
        on_host_only(made, PROMPT)
        made.portal.executor.hold()
        waiting = made.submit(PROMPT, 3)
        other = made.submit(text(9, 12), 3)
        for _ in range(6):
            made.step()
        assert other.stats.first_token_s is not None
        assert waiting.stats.first_token_s is None
        made.portal.executor.release()
        made.drain()
        assert waiting.stats.external_tokens > 0
        made.assert_outputs()
        made.assert_clean()


@pytest.mark.parametrize("ending", ["abort", "reset"])
def test_a_check_survives_what_ends_its_request(ending: str) -> None:
    with rig(extra={"verify": "full"}) as made:
        assert interrupt_reading(made, ending).stats.external_tokens == 0


def test_a_check_that_never_ends_holds_nobody_up_for_ever() -> None:
    with rig(num_blocks=100, host_blocks=40, extra={"verify": "full"}) as made:
        assert lose_reading(made).stats.external_tokens == 0
        assert made.count("abandoned_jobs", "check") == 1
        assert made.offload.gauges().slots["quarantined"] == made.count("written_off_blocks", "check") > 0
        made.assert_outputs()


def test_checks_are_made_when_the_portals_thread_is_gone() -> None:
    with rig(extra={"verify": "full"}) as made:
        read_without_portal(made)
        assert made.count("transfers", "host", "check", "corrupt") == 1
        assert lost_loads(made) == 0
