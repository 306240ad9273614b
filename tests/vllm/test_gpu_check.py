from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvoffload.gpu_check.parts import NotHere, Options
from tests.vllm.engine_rig import MARKS

if TYPE_CHECKING:
    from kvoffload.gpu_check.parts import Line

pytestmark = MARKS

ON_CPU = {"enforce_eager": True, "dtype": "float32", "compilation_config": {"custom_ops": ["none"]}}


def test_both_engines_decode_and_stored_blocks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvoffload_vllm import gpu_check

    for name, value in {**gpu_check.ENVIRONMENT, "OMP_NUM_THREADS": "1", "VLLM_TARGET_DEVICE": "cpu"}.items():
        monkeypatch.setenv(name, value)
    for name, number in {"RUNNING": 2, "TOKENS": 40, "PAIRS": 2}.items():
        monkeypatch.setattr(gpu_check, name, number)
    found = {one.what: one for one in gpu_check.measure("vLLM", 1 << 26, {}, ON_CPU)}
    assert all(one.median is not None and one.median > 0 for one in found.values())
    checks: list[Line] = [one for one in found.values() if one.is_check]
    assert [one.verdict for one in checks] == ["pass", "pass"]
    assert found["vLLM: tokens found on the host, of 258 that vLLM's cache had lost"].median == 2 * 128
    assert found["vLLM: a decoding step, over one without"].target == "at most 1.02x"
    assert {"vLLM: the scheduler's hooks in a step", "vLLM: the worker's hooks in a step"} <= found.keys()
    wakes = found["vLLM: wakes of the portal in a step"].median
    assert wakes is not None
    assert wakes <= 1


@pytest.mark.parametrize(
    ("host_bytes", "reason"), [(1 << 30, "torch sees no GPU"), (1 << 50, "TiB and more, and the machine has")]
)
def test_a_part_that_cannot_run_gives_the_reason(host_bytes: int, reason: str) -> None:
    from kvoffload_vllm import gpu_check

    with pytest.raises(NotHere, match=reason):
        list(gpu_check.lines(Options("cuda:0", 1 << 20, 1, host_bytes)))
