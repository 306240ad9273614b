"""Stock vLLMs of two tensor-parallel ranks that share a real store: `make sharing-ranks`, as it takes minutes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.vllm_adapter.engine_rig import MARKS, check_same
from tests.vllm_adapter.sharing_rig import apart
from tests.vllm_adapter.test_remote_on_vllm import (
    OF_FIRST,
    answers,
    check_not_found,
    share,
    share_in_turns,
    start,
    stop,
)
from tests.vllm_stock import checkpoints

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = MARKS


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["mooncake", "bucket"])
def test_r18_two_ranks_share_with_two_ranks_and_not_with_one(
    request: pytest.FixtureRequest, kind: str, tmp_path: Path
) -> None:
    url = request.getfixturevalue(kind).url
    model = checkpoints.make("qwen3", tmp_path / "qwen3")
    with apart(2) as both:
        first, second = both
        expected = answers(first, model, tmp_path)
        assert len({*start(both, model, tmp_path, url, 2)}) == 1
        share_in_turns(both, expected)
        share(second, OF_FIRST, expected)
        first.do("stop")
        first.do("start", model, tmp_path, url, 1)
        check_same(check_not_found(first, OF_FIRST), expected)
        stop(both)
