from __future__ import annotations

from pathlib import Path

import pytest

from kvoffload.model.wire import Direction
from tests.vllm.engine_rig import MARKS, check_same
from tests.vllm.sharing_rig import sharing
from tests.vllm.stock import checkpoints
from tests.vllm.test_remote import BLOCKS, CACHED, PROMPT
from tests.vllm.versions.test_refusals import is_refused

pytestmark = MARKS


@pytest.mark.parametrize("kind", ["mooncake", "bucket"])
def test_one_engine_finds_blocks_that_another_has_written(
    request: pytest.FixtureRequest, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_refused("qwen3"):
        pytest.skip("refused at start")  # another test in this folder checks the refusal
    # Before 0.29, the seed of vLLM's hashes is random without this variable.
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    url = request.getfixturevalue(kind).url
    model = checkpoints.make("qwen3", tmp_path / "qwen3")
    with sharing(model, tmp_path, url) as first:
        expected = first.ask("n0", PROMPT)
        assert expected.cached == 0
        while first.copied(Direction.STORE) < BLOCKS:
            first.ask("n1", PROMPT)
        first.rig.check_clean()
    with sharing(model, tmp_path, url) as second:
        found = second.ask("n0", PROMPT)
        check_same({"n0": found}, {"n0": expected})
        assert (found.cached, second.copied(Direction.LOAD)) == (CACHED, BLOCKS)
        second.rig.check_clean()
