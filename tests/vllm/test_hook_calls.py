"""Counts the Python calls that a request causes in the connector's hooks on vLLM's scheduler, with all
observers.

Only calls within kvoffload and its plugin are counted, without comprehensions and C functions. The counts do
not depend on the machine, so tests can limit them. `make bench-hooks` measures times.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from kvoffload.model.causes import CopyOutcome
from kvoffload.model.ids import Rank
from kvoffload.model.wire import NOTHING, JobReport, TransferReport
from tests.vllm.engine_rig import MARKS
from tests.vllm.scheduler_rig import BLOCK, BLOCKS, adapter, make_request, step_output, table

pytestmark = MARKS

WHOLE = 8
"""A prompt has this many whole blocks, and ends with a part of another block."""
PROMPT = WHOLE * BLOCK + 8
LIVES = 64
"""The journal writes many messages together, so calls are averaged over this many requests."""

MOST_CALLS = {
    "a fresh request's life": 169,
    "a returning request's life": 204,
    "a lookup that misses": 10,
    "a lookup that hits": 16,
    "a step in which nothing happens": 13,
}


class Calls:
    def __init__(self) -> None:
        self.by_hook: dict[str, Counter[str]] = {}

    def of(self, what: str, hook: Callable[..., Any], *args: Any) -> Any:
        found = self.by_hook.setdefault(what, Counter())

        def seen(frame: FrameType, event: str, _: object) -> None:
            code = frame.f_code
            is_ours = "kvoffload" in code.co_filename or code.co_filename == "<string>"
            if event == "call" and is_ours and code.co_name not in _COMPREHENSIONS:
                found[code.co_qualname] += 1

        sys.setprofile(seen)
        try:
            return hook(*args)
        finally:
            sys.setprofile(None)

    def total(self, *hooks: str) -> int:
        return sum(self.by_hook[hook].total() for hook in hooks or self.by_hook)


_COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")


class Life:
    """Serves requests as vLLM's scheduler would, with a connector and vLLM's block pool."""

    def __init__(self, connector: Any, pool: Any, calls: Calls) -> None:
        self.connector, self.pool, self.calls = connector, pool, calls
        self.numbers = count()

    def live(self, seed: int) -> None:
        """Serve one request: look it up, load the hit, compute the rest, store blocks, and end the request."""
        connector, calls, name = self.connector, self.calls, f"r{next(self.numbers)}"
        request = make_request(name, [seed] * PROMPT)
        calls.of("seen", connector.on_new_request, request)
        found, _ = calls.of("lookup", connector.get_num_new_matched_tokens, request, 0)
        blocks = self.pool.get_new_blocks(WHOLE + 1)
        placed = table([block.block_id for block in blocks])
        calls.of("allocated", connector.update_state_after_alloc, request, placed, found)
        if found:
            request.num_computed_tokens = found
            self.pool.cache_full_blocks(request, blocks, 0, WHOLE, BLOCK, 0)
            self.report(self.step())
            calls.of("allocated", connector.update_state_after_alloc, request, placed, 0)
        self.report(self.step(request, PROMPT - found, is_new=True))
        request.num_computed_tokens = PROMPT
        request.append_output_token_ids(1)
        if not found:
            self.pool.cache_full_blocks(request, blocks, 0, WHOLE, BLOCK, 0)
        self.report(self.step(request, 1))
        calls.of("ended", connector.request_finished_all_groups, request, ([1],))
        self.pool.free_blocks(reversed(blocks))

    def step(self, request: Any = None, tokens: int = 0, *, is_new: bool = False) -> Any:
        """Run a step with this request, or with no request; return the plan."""
        output = step_output(request, tokens, is_new=is_new)
        plan = self.calls.of("step", self.connector.build_connector_meta, output).plan
        self.calls.of("after step", self.connector.get_kv_connector_stats)
        self.calls.of("after step", self.connector.take_events)
        return plan

    def report(self, plan: Any) -> None:
        from kvoffload_vllm.metadata import KVOffloadWorkerMetadata

        if plan == NOTHING:
            return
        ended = [JobReport(job.id, job.direction, CopyOutcome.DONE, 1, 0.0, 0.0) for job in plan.jobs]
        reports = (TransferReport(Rank(0), tuple(ended), BLOCKS),)
        output = SimpleNamespace(kv_connector_worker_meta=KVOffloadWorkerMetadata(reports))
        self.calls.of("report", self.connector.update_connector_output, output)


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, float]]:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from kvoffload_vllm.connector import KVOffloadConnector

    with adapter(BLOCK, now=lambda: 0.0, report_every=16) as (scheduler, pool):
        connector = KVOffloadConnector.__new__(KVOffloadConnector)
        connector.__dict__.update(vars(scheduler), _role=KVConnectorRole.SCHEDULER)
        scheduler.offload.reported([TransferReport(Rank(0), (), BLOCKS)])
        warm, fresh, back, idle = (Life(connector, pool, Calls()) for _ in range(4))
        keep = make_request("keep", [0] * PROMPT)  # with this open request, the engine is never idle
        connector.on_new_request(keep)
        for seed in (*range(1, 20), 19):  # the last prompt is the same as the one before
            warm.live(seed)
        for seed in range(LIVES):
            fresh.live(100 + seed)
        for seed in range(LIVES):
            back.live(100 + LIVES - 5 + seed % 4)
        for _ in range(LIVES):
            idle.step()
        counters = scheduler.offload.counters.snapshot()
        assert counters.total("kvoffload_store_blocks_total") == (19 + LIVES) * WHOLE
        assert counters.count("kvoffload_load_blocks_total", "loaded") == (1 + LIVES) * WHOLE
        yield {
            "a fresh request's life": fresh.calls.total() / LIVES,
            "a returning request's life": back.calls.total() / LIVES,
            "a lookup that misses": fresh.calls.total("lookup") / LIVES,
            "a lookup that hits": back.calls.total("lookup") / LIVES,
            "a step in which nothing happens": idle.calls.total() / LIVES,
        }


@pytest.mark.parametrize("what", MOST_CALLS)
def test_hooks_make_no_more_calls_than_allowed(what: str, found: dict[str, float]) -> None:
    assert found[what] <= MOST_CALLS[what], found
