"""Tests that stock vLLMs with two tensor-parallel ranks, which run one after the other, share a real remote tier.

`make sharing-ranks` runs this file. It takes some minutes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.vllm.engine_rig import MARKS, check_same
from tests.vllm.sharing_rig import apart
from tests.vllm.stock import checkpoints
from tests.vllm.test_remote import (
    OF_FIRST,
    OF_SECOND,
    answers,
    check_found,
    check_not_found,
    share,
    stop,
)

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = MARKS


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["mooncake", "bucket"])
def test_r18_two_ranks_share_blocks_with_two_ranks_and_not_with_one(
    request: pytest.FixtureRequest, kind: str, tmp_path: Path
) -> None:
    url = request.getfixturevalue(kind).url
    model = checkpoints.make("qwen3", tmp_path / "qwen3")
    with apart(2) as (first, second):
        expected = answers(first, model, tmp_path)
        shared = first.do("start", model, tmp_path, url, 2)
        share(first, OF_FIRST, expected)
        check_same(check_not_found(first, OF_SECOND), expected)
        # Stop the first engine: its ranks spin while they wait, and four spinning ranks would leave two cores
        # no time for other work.
        stop([first])
        assert second.do("start", model, tmp_path, url, 2) == shared
        check_found(second, OF_FIRST, expected)
        share(second, OF_SECOND, expected)
        stop([second])
        assert first.do("start", model, tmp_path, url, 1) != shared
        check_same(check_not_found(first, OF_FIRST), expected)
        stop([first])
