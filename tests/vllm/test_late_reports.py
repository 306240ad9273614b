from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvoffload.model.facts import StepScheduled
from tests.vllm.engine_rig import MARKS
from tests.vllm.scheduler_rig import adapter
from tests.vllm.test_hook_calls import BLOCK, make_request, step_output

pytestmark = MARKS


@pytest.mark.parametrize("was_reset", [False, True])
def test_r10_after_a_reset_new_blocks_are_reported_in_the_step_that_allocates_them(was_reset: bool) -> None:
    with adapter(BLOCK, report_every=16) as (scheduler, pool):
        steps: list[StepScheduled] = []
        step = scheduler.offload.step

        def noting(fact: StepScheduled) -> Any:
            steps.append(fact)
            return step(fact)

        scheduler.offload.step = noting
        if was_reset:
            scheduler.offload.reset()
        request = make_request("a", 1)
        scheduler.on_new_request(request)
        scheduler.get_num_new_matched_tokens(request, 0)
        blocks = [block.block_id for block in pool.get_new_blocks(9)]
        table: Any = SimpleNamespace(get_block_ids=lambda: (blocks,))
        scheduler.update_state_after_alloc(request, table, 0)
        scheduler.build_connector_meta(step_output(request, request.num_tokens, is_new=True))
        request.num_computed_tokens = request.num_tokens
        scheduler.build_connector_meta(step_output(request, 1, is_new=False))
        gains = step_output(request, 1, is_new=False)
        gains.scheduled_cached_reqs.new_block_ids = [([50],)]
        scheduler.build_connector_meta(gains)
        assert [fact.progress for fact in steps[2:]] == [()]
        assert steps[2].reallocated == ((50,) if was_reset else ())
