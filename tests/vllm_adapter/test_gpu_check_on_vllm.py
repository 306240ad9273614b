"""vLLM's part of `kvoffload gpu-check`, with a tiny model on a CPU."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from kvoffload.bench.lines import Line
from tests.vllm_adapter.engine_rig import MARKS

if TYPE_CHECKING:
    import pytest

pytestmark = MARKS


def test_both_engines_decode_and_what_was_stored_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvoffload_vllm import bench_engines, gpu_check

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    bench_engines.prepare_process(on_gpu=False)
    for name, value in {"RUNNING": 2, "TOKENS": 40, "PAIRS": 2}.items():
        monkeypatch.setattr(gpu_check, name, value)
    found = {one.what: one for one in gpu_check.measure("vLLM", 1 << 26, {}, {})}
    assert all(one.median is not None and one.median > 0 for one in found.values())
    checks: list[Line] = [one for one in found.values() if one.is_check]
    assert [one.verdict for one in checks] == ["pass", "pass"]
    assert found["vLLM: tokens found on the host, of 258 that vLLM's cache had lost"].median == 2 * 128
    assert found["vLLM: a decoding step, over one without"].target == "at most 1.02x"


def test_without_a_gpu_one_line_says_so() -> None:
    """In a process of its own, whose last line of output is what is read."""
    from kvoffload_vllm import gpu_check

    (one,) = gpu_check.lines(1 << 20)
    assert one.what == "vLLM with host_bytes 0.000976562GiB: not run, torch sees no GPU"
    assert (one.found, one.verdict) == ("", "")


def test_with_too_little_memory_it_is_not_started() -> None:
    from kvoffload_vllm import gpu_check

    (one,) = gpu_check.lines(1 << 50)
    assert "not run, the machine has" in one.what


def test_an_engine_that_dies_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvoffload_vllm import gpu_check

    monkeypatch.setattr(sys, "executable", "/bin/false")
    (one,) = gpu_check.lines(1 << 20)
    assert one.verdict == "fail"
