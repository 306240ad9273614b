from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvoffload.engine import SamplingParams
from kvoffload.engine.block_pool import BlockPool
from kvoffload.model import facts
from kvoffload.model.groups import AttentionKind
from kvoffload.model.ids import BlockKey, DeviceBlockId, RequestId
from kvoffload.telemetry import spans
from kvoffload_reference.scheduler import PoolDevice
from tests.reference.rig import KINDS, STEP_S, Rig, on_host_only, rig, text


def received(made: Rig, *classes: type[facts.Fact]) -> list[Any]:
    """Return a list that receives all later facts of these classes."""
    found: list[Any] = []
    for cls in classes:
        made.offload.bus.count(cls, found.append)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_adapter_reports_the_engines_shape(kind: str) -> None:
    with rig(kind, ranks=2, num_blocks=50, step_tokens=12) as made:
        shape = made.offload.shape
        assert (shape.ranks, shape.device_blocks, shape.step_tokens, shape.alignment) == (2, 49, 12, 4)
        assert [group.kind for group in shape.groups][-1] is AttentionKind.FULL
        assert {group.kind.value for group in shape.groups[:-1]} <= {kind}
        assert len(shape.groups) == (1 if kind == "full" else 3)


def test_every_key_and_block_is_reported_once_and_only_when_it_is_new() -> None:
    with rig() as made:
        reported = received(made, facts.RequestSeen, facts.StepScheduled, facts.RequestEnded)
        stream = made.engine.submit(text(1, 10), SamplingParams(12))
        request = made.engine._open[stream.request_id][0]
        made.drain()
        seen = next(fact for fact in reported if isinstance(fact, facts.RequestSeen))
        steps = [fact for fact in reported if isinstance(fact, facts.StepScheduled)]
        changes = [progress for step in steps for progress in step.progress]
        end = next(fact for fact in reported if isinstance(fact, facts.RequestEnded))
        keys = [*seen.keys[0], *(key for each in changes for key in each.new_keys[0]), *end.new_keys[0]]
        assert keys == list(request.keys(0))
        assert len(changes) <= 2 + 2 * (len(keys) - len(seen.keys[0]) + 1)
        assert (end.confirmed_tokens, end.holds_blocks) == (21, True)


@pytest.mark.parametrize("state", ["waiting", "loading", "running", "preempted"])
def test_every_way_a_request_ends_is_reported(state: str) -> None:
    with rig(max_requests=1) as made:
        on_host_only(made, text(1, 25))
        made.hold()
        reported = received(made, facts.RequestEnded)
        if state == "waiting":
            made.engine.submit(text(5, 5))
            made.step()
        stream = made.engine.submit(text(1, 25) if state == "loading" else text(2, 25), SamplingParams(8))
        if state != "waiting":
            made.step()
        if state == "preempted":
            assert made.engine.preempt(stream.request_id)
        made.engine.abort(stream.request_id)
        [end] = reported
        assert end.holds_blocks == (state == "running")
        assert (end.confirmed_tokens > 0) == (state == "running")
        made.check()
        made.release()
        made.drain()
        made.assert_clean()


def test_the_adapter_uses_the_engines_own_pool() -> None:
    pool = BlockPool(6)
    device = PoolDevice(pool)
    blocks = list(map(DeviceBlockId, pool.allocate(3)))
    pool.index(blocks[0], b"key")
    assert list(device.keys_of(blocks[:2])) == [b"key", None]
    assert (device.block_of(BlockKey(b"key")), device.block_of(BlockKey(b"other"))) == (blocks[0], None)
    device.lease(blocks)
    pool.release(blocks)
    assert device.free_blocks() == 2
    device.release([blocks[0], blocks[2], blocks[1]])
    assert list(device.next_evictable(9))[-1] == blocks[0]
    assert device.free_blocks() == 5


def test_a_preempted_requests_last_block_is_looked_up_before_any_step_reports_it() -> None:
    with rig(num_blocks=60) as made:
        made.run(text(1, 10), 16)
        stream = made.submit(text(1, 10), 16)
        request = made.engine._open[stream.request_id][0]
        record = made.offload.core.state.requests.live.get(RequestId(stream.request_id))
        assert record is not None
        while len(request.keys(0)) == len(record.keys[0]) or request.num_tokens == 4 * len(request.keys(0)):
            made.step()
        known = len(request.keys(0))
        assert made.engine.preempt(stream.request_id)
        made.forget_device()
        made.drain()
        assert stream.stats.resumed_tokens == 4 * known


# -- what an engine reports to observers ------------------------------------------------------------------------


def test_first_tokens_are_counted_by_lookup_result_with_the_engines_own_times() -> None:
    prompt = text(1, 40)
    with rig() as made:
        for forget in (True, False, False):
            made.run(prompt)
            if forget:
                made.forget_device()
        counted = made.counts().distributions["kvoffload_first_token_seconds"]
        for found, (_, _, stream) in zip(("nothing", "host", "device"), made.streams, strict=True):
            assert stream.stats.first_token_s is not None
            known_s = stream.stats.first_token_s - stream.stats.arrived_s
            assert counted[found,].samples == 1
            assert known_s <= counted[found,].total <= known_s + 2 * STEP_S


def test_a_callers_trace_includes_the_lookup_and_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, parent = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(spans, "make_exporter", lambda endpoint: exporter)
    with rig(extra={"otlp_endpoint": "http://127.0.0.1:9/v1/traces"}) as made:
        made.run(text(1, 40))
        made.forget_device()
        made.engine.submit(text(1, 40), trace_parent=f"00-{trace:032x}-{parent:016x}-01")
        made.drain()
    found = exporter.get_finished_spans()
    of_trace = {one.name: one for one in found if one.context and one.context.trace_id == trace}
    assert of_trace.keys() >= {"kvoffload.lookup", "kvoffload.load"}
    root = of_trace["kvoffload.request"]
    assert root.parent is not None
    assert root.parent.span_id == parent
