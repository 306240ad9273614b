from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.engine_rig import MARKS, check_same, corrupt_host, same
from tests.vllm.tiers_rig import BLOCKS, CACHED, LOAD, STORE, draw, living
from tests.vllm.versions.test_refusals import is_refused

pytestmark = MARKS


@pytest.fixture(autouse=True)
def starts(monkeypatch: pytest.MonkeyPatch) -> None:
    if is_refused("qwen3"):
        pytest.skip("refused at start")  # another test in this folder checks the refusal
    # Before 0.29, the seed of vLLM's hashes is random without this variable.
    monkeypatch.setenv("PYTHONHASHSEED", "0")


def test_put_blocks_are_found_after_a_restart(tmp_path: Path) -> None:
    with living("qwen3", tmp_path) as life:
        expected = life.ask()
        assert not any(answer.cached for answer in expected.values())
        life.put_on_disk()
        life.rig.check_clean()
    with living("qwen3", tmp_path) as life:
        assert life.restored > 0
        answers = life.ask()
        check_same(answers, expected)
        assert {answer.cached for answer in answers.values()} == {CACHED}
        assert life.copied(LOAD) > 0
        life.rig.check_clean()
        # As a control, check that wrong bytes change the answers.
        corrupt_host(life.rig)
        assert life.rig.scheduler.reset_prefix_cache()
        assert not all(same(answer, expected[name]) for name, answer in life.ask().items())


def test_one_engine_finds_blocks_that_another_has_written(url: str, tmp_path: Path) -> None:
    asked = draw(3, 1)
    with living("qwen3", tmp_path, url) as first:
        expected = first.ask(asked)
        while first.copied(STORE) < BLOCKS:
            first.ask_without_device(asked)
        first.rig.check_clean()
    with living("qwen3", tmp_path, url) as second:
        found = second.ask(asked)
        check_same(found, expected)
        assert ([one.cached for one in found.values()], second.copied(LOAD)) == ([CACHED], BLOCKS)
        second.rig.check_clean()
