from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvoffload_vllm.progress import KeyMaker, Tracked
from tests.vllm.adapter.stand_ins import on_vllm

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    ("fields", "parent"),
    [
        ({}, None),  # some versions of vLLM have no traces
        ({"trace_headers": None}, None),
        ({"trace_headers": {"tracestate": "a=b"}}, None),
        ({"trace_headers": {"traceparent": PARENT, "tracestate": "a=b"}}, PARENT),
    ],
)
def test_the_callers_trace_is_found(fields: dict[str, Any], parent: str | None) -> None:
    request: Any = SimpleNamespace(request_id="a", **fields)
    assert Tracked(request).trace_parent == parent


@pytest.mark.parametrize(
    ("hashes", "is_rewritten"),
    [
        ([b"a", b"b", b"c"], False),
        ([b"a", b"b", b"c", b"d"], False),
        ([b"a", b"b"], True),
        ([], True),
        ([b"a", b"b", b"x"], True),
        ([b"a", b"b", b"x", b"y"], True),
    ],
)
def test_hashes_that_were_rewritten_are_noticed(hashes: list[bytes], is_rewritten: bool) -> None:
    request: Any = SimpleNamespace(request_id="a", block_hashes=[])
    tracked, maker = Tracked(request), KeyMaker([1], [0])
    tracked.new_keys(maker)
    assert not tracked.is_rewritten
    request.block_hashes = [b"a", b"b", b"c"]
    assert not tracked.is_rewritten
    tracked.new_keys(maker)
    request.block_hashes = hashes
    assert tracked.is_rewritten == is_rewritten


@on_vllm
def test_the_callers_trace_is_where_vllm_keeps_it() -> None:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    headers = {"traceparent": PARENT}
    request = Request("a", [1, 2, 3], SamplingParams(max_tokens=1), None, trace_headers=headers)
    assert Tracked(request).trace_parent == PARENT
