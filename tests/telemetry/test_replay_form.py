"""Every fact can be written in full and read again, with numbers where its keys were."""

from __future__ import annotations

import json

import pytest

from kvoffload.core.state import LoadResults, Policy
from kvoffload.model import facts
from kvoffload.model.causes import CopyOutcome, DegradeCause
from kvoffload.model.engine import EngineShape, Promises
from kvoffload.model.groups import AttentionKind, GroupSpec
from kvoffload.model.ids import BlockKey, DeviceBlockId, GroupId, JobId, Rank, RequestId, SlotId
from kvoffload.model.transfer import Direction, JobReport, TransferJob, TransferPlan, TransferReport
from kvoffload.telemetry.replay_form import FACTS, KeyNumbers, key_of, read, write

A, B = RequestId("a"), RequestId("b")
KEYS = tuple(map(key_of, (1, 2, 3)))  # as they are read again: written in this order, they keep their numbers
BLOCKS = (DeviceBlockId(4), DeviceBlockId(0))

EXAMPLES: tuple[facts.Fact, ...] = (
    facts.RequestSeen(A, 9, (KEYS[:2], ()), reads_cache=False),
    facts.BlocksAllocated(A, (BLOCKS, ()), 4, 8),
    facts.StepScheduled(
        3, (facts.Progress(A, 8, (BLOCKS,), (KEYS[:1],)), facts.Progress(B, 1)), (B,), BLOCKS, 5, 1
    ),
    facts.StatesHandedOff(((KEYS[0], BLOCKS[0]), (KEYS[1], BLOCKS[1]))),
    facts.RequestEnded(A, 7, (KEYS,), holds_blocks=False),
    facts.TransferReported(
        TransferReport(
            Rank(1),
            (JobReport(JobId(2), Direction.LOAD, CopyOutcome.CORRUPT, 0, 0.5, 1, (0, 3)),),
            12,
            0.5,
            is_growing=True,
        )
    ),
    facts.JobOverdue(JobId(5)),
    facts.CacheReset(),
    facts.RankLost(Rank(2)),
    facts.LawBroken(DegradeCause.LAW_BROKEN, "slot 3"),
)


def test_there_is_an_example_of_every_fact() -> None:
    assert {type(example) for example in EXAMPLES} == set(FACTS.values())


@pytest.mark.parametrize("fact", EXAMPLES, ids=lambda fact: type(fact).__name__)
def test_a_fact_is_read_as_it_was_written(fact: facts.Fact) -> None:
    text = json.dumps(write(fact, type(fact), KeyNumbers()))
    assert read(json.loads(text), FACTS[type(fact).__name__]) == fact


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (
            TransferPlan(
                (TransferJob(JobId(1), Direction.LOAD, (SlotId(2),), (BLOCKS[0],)),),
                (TransferJob(JobId(2), Direction.STORE, (SlotId(3),), (BLOCKS[0],)),),
            ),
            TransferPlan,
        ),
        (LoadResults([A], [B]), LoadResults),
        (Policy("lazy", "lru", 4, 2), Policy),
        (
            EngineShape(
                (
                    GroupSpec(GroupId(0), AttentionKind.SLIDING_WINDOW, 4, 7),
                    GroupSpec(GroupId(1), AttentionKind.FULL, 8),
                ),
                2,
                30,
                16,
                promises=Promises(can_wait=False),
            ),
            EngineShape,
        ),
        (None, int | None),
        (3, int | None),
    ],
    ids=str,
)
def test_so_is_what_is_asked_and_answered(value: object, hint: object) -> None:
    assert read(json.loads(json.dumps(write(value, hint, KeyNumbers()))), hint) == value


def test_equal_keys_have_equal_numbers_and_nothing_else_is_kept_of_them() -> None:
    numbers, hint = KeyNumbers(), tuple[BlockKey, ...]
    first, second, third = (BlockKey(bytes([number]) * 36) for number in (7, 8, 9))
    assert write((first, second, first), hint, numbers) == [1, 2, 1]
    assert write((third, second), hint, numbers) == [3, 2]
    assert read([1, 2, 1], hint) == (key_of(1), key_of(2), key_of(1))


def test_free_text_is_scrubbed() -> None:
    fact = facts.LawBroken(DegradeCause.HANDLER_RAISED, "KeyError(b'secret')")
    assert write(fact, facts.LawBroken, KeyNumbers())["detail"] == "KeyError(b'...')"


@pytest.mark.parametrize(
    "change",
    [
        {"request": 3},
        {"prompt_tokens": "9"},
        {"prompt_tokens": True},
        {"keys": {}},
        {"keys": [[-1.5]]},
        {"reads_cache": 1},
        {"more": 1},
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(change: dict[str, object]) -> None:
    written = write(EXAMPLES[0], facts.RequestSeen, KeyNumbers())
    with pytest.raises(ValueError, match=r"is not|unknown fields"):
        read({**written, **change}, facts.RequestSeen)


def test_a_type_without_a_form_is_our_own_bug() -> None:
    with pytest.raises(TypeError, match="no form"):
        write({}, dict, KeyNumbers())
