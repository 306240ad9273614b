from __future__ import annotations

import pytest

from kvoffload.model import facts
from kvoffload.model.ids import DeviceBlockId, RequestId

RUNS = facts.Progress(RequestId("a"), 4)


@pytest.mark.parametrize(
    ("fact", "is_idle"),
    [
        (facts.StepScheduled(1), True),
        (facts.StepScheduled(1, progress=(RUNS,)), False),
        (facts.StepScheduled(1, preempted=(RequestId("a"),)), False),
        (facts.StepScheduled(1, reallocated=(DeviceBlockId(3),)), False),
    ],
)
def test_a_step_that_reports_nothing_new_is_idle(fact: facts.StepScheduled, is_idle: bool) -> None:
    assert fact.is_idle is is_idle


def test_a_fact_is_not_altered() -> None:
    with pytest.raises(AttributeError, match="immutable"):
        facts.StepScheduled(1).step = 2  # type: ignore[misc]
