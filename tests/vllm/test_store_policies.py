"""A store policy that moves while requests run changes no answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvoffload.telemetry.policies import PolicyChoice
from tests.vllm.engine_rig import MARKS, check_same, offloading, plain
from tests.vllm.test_engine_equality import REQUESTS

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

pytestmark = MARKS


def test_a_store_policy_that_moves_under_traffic_changes_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PolicyChoice, "decide", lambda *_: None)  # only this test chooses
    with plain("qwen3", tmp_path, num_gpu_blocks_override=512) as rig:
        expected = rig.run(REQUESTS)
    with offloading("qwen3", tmp_path, 64, extra={"store_policy": "auto"}) as rig:
        reports = rig.connector._progress
        often = reports._every
        for number, policy in enumerate(("twice", "lazy", "eager", "lazy")):
            for name, asked in list(REQUESTS.items())[10 * number : 10 * number + 10]:
                rig.ask(name, asked)
            rig.step()
            rig.side.choose_policy(policy, {})
            rig.finish()
            assert rig.side.core.store_policy == policy
            assert reports._every == (1 if policy == "lazy" else often)
        assert often > 1
        check_same(rig.reported, expected)
        rig.check_clean()
