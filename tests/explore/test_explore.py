from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.explore.invariants import check_end
from tests.explore.programs import Action, replay
from tests.explore.scene import Scene
from tests.explore.search import explore
from tests.explore.worlds import WORLDS
from tests.mutants.rules import undone

BOUND = 250


@pytest.mark.parametrize("name", WORLDS)
def test_no_rule_is_broken_in_any_state(name: str) -> None:
    seen = explore(WORLDS[name], states=BOUND)
    assert seen.violation is None, seen.violation.as_test(name)
    assert seen.states >= BOUND
    assert seen.ends


def test_a_world_is_explored_to_its_last_state() -> None:
    world = WORLDS["one request"]
    small = type(world)(texts={"a": "abcde"}, host=1)
    seen = explore(small, states=100_000)
    assert (seen.is_exhausted, seen.violation) == (True, None)
    assert explore(small, states=100_000) == seen


# -- disabled rules are detected --------------------------------------------------------------------------------

SHOWN_IN = {
    "r1_load_without_pin": "a load",
    "r2_tokens_without_a_pin_count_as_loaded": "violations",
    "r3_keys_in_flight_are_not_known": "two requests",
    "r4_one_rank_is_enough": "spills on two ranks",
    "r4_late_rank_is_ignored": "two ranks",
    "r5_no_lease": "one request",
    "r5_overdue_load_frees_its_blocks": "a load",
    "r7_stale_ids_stay": "window",
    "r8_nothing_is_held": "one request",
    "r9_failed_load_counts_as_loaded": "a load",
    "r9_first_part_counts_as_the_load": "a load in parts",
    "r9_rest_of_a_long_load_never_fails": "a load in parts",
    "r10_reset_forgets_nothing": "one request",
    "r10_store_of_before_reset_arrives": "one request",
    "r10_copies_with_tiers_survive_a_reset": "spills",
    "r11_tables_are_kept": "one request",
    "r14_shared_load_never_ends": "sharing a load",
    "r14_every_request_loads": "sharing a load",
    "r14_an_answer_ends_no_wait": "puts",
    "r16_quarantined_slot_comes_back": "one request",
    "r16_timed_out_job_counts_as_ended": "one request",
    "r16_file_slot_under_a_hanging_write_comes_back": "spills",
    "r17_file_slot_is_written_while_the_index_names_it": "a spill over another",
    "r17_missing_value_counts_as_fetched": "sharing a fetch from the store",
    "r17_lost_store_is_used": "a store that is lost",
    "r18_hints_outlive_their_generation": "a store that is lost",
    "r19_every_load_has_room": "too little room for two loads",
    "r20_slot_is_not_invalidated": "churn of what is found again",
    "r20_published_before_the_last_rank": "stores on two ranks, found again",
    "r20_corrupt_slot_stays_in_the_table": "a load of what is found again",
}
"""For each disabled rule, a world whose exploration detects it."""


@pytest.mark.full
@pytest.mark.parametrize("rule", SHOWN_IN)
def test_a_disabled_rule_is_found_with_a_program_that_breaks_it(rule: str) -> None:
    name = SHOWN_IN[rule]
    namespace: dict[str, Callable[[], None]] = {}
    with undone(rule):
        violation = explore(WORLDS[name], states=3_000).violation
        assert violation is not None
        exec(violation.as_test(name), namespace)
        (test,) = (value for key, value in namespace.items() if key.startswith("test_"))
        with pytest.raises(Exception, match=re.escape(violation.problem.partition(": ")[2]) or None):
            test()
    test()


# -- programs that once broke a rule, as the exploration printed them -------------------------------------------

FOUND: dict[str, tuple[str, list[Action]]] = {
    "R15 an offer that had waited marked one block of a prefix as used, but not its head": (
        "two requests",
        [
            ("add", "a"),
            ("add", "b"),
            ("lookup", "a", "patient"),
            ("allocate", "a", "all"),
            ("step", "a"),
            ("step", "a"),
            ("lookup", "b", "patient"),
            ("allocate", "b", "all"),
            ("step", "b"),
            ("step", "b"),
            ("step", "b"),
            ("report", 0, 0, "done"),
            ("end", "a"),
            ("step", "b"),
            ("report", 0, 0, "done"),
            ("step", "b"),
        ],
    ),
    "R12 a fetch of a request that had ended was cancelled after offloading was switched off": (
        "a disk that opens",
        [("open",), ("open",), ("add", "a"), ("step",), ("end", "a"), ("degrade",), ("step",)],
    ),
    "the disk's index recorded the use of a block that a rank had found corrupt in an earlier fetch": (
        "a fetch on two ranks",
        [("step",), ("report", 0, 0, "fail"), ("add", "a"), ("step",), ("report", 1, 0, "corrupt")],
    ),
}


@pytest.mark.parametrize("what", FOUND)
def test_a_program_that_once_broke_a_rule_breaks_none(what: str) -> None:
    world, program = FOUND[what]
    check_end(replay(Scene.first(WORLDS[world]), program))
