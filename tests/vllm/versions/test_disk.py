from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.engine_rig import MARKS, check_same, corrupt_host, same
from tests.vllm.stock import engines
from tests.vllm.test_disk import PROMPTS, grows, living
from tests.vllm.versions.test_refusals import is_refused

pytestmark = MARKS


def test_put_blocks_are_found_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_refused("qwen3"):
        pytest.skip("refused at start")  # another test in this folder checks the refusal
    # Before 0.29, the seed of vLLM's hashes is random without this variable.
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    with living("qwen3", tmp_path) as life:
        expected = life.ask()
        assert not any(answer.cached for answer in expected.values())
        while grows(life):
            pass
        life.rig.check_clean()
    with living("qwen3", tmp_path) as life:
        assert life.restored > 0
        answers = life.ask()
        check_same(answers, expected)
        assert {answer.cached for answer in answers.values()} == {6 * engines.BLOCK}
        assert life.fetched() > 0
        life.rig.check_clean()
        # As a control, check that wrong bytes change the answers.
        assert life.rig.scheduler.reset_prefix_cache()
        for position in range(len(life.rig.side.core.state.pool.index)):
            corrupt_host(life.rig, position)
        assert not all(same(answer, expected[name]) for name, answer in life.ask(PROMPTS).items())
