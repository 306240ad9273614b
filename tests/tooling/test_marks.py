import importlib.util

import pytest

from tests.conftest import reasons_to_skip


def test_a_missing_program_or_library_is_named(request: pytest.FixtureRequest) -> None:
    request.node.add_marker(pytest.mark.tools("sh", "c", "no-such-program"))
    assert reasons_to_skip(request.node) == ["needs no-such-program: make tools"]


@pytest.mark.parametrize("available", [False, True])
def test_gpu_tests_need_a_device(
    available: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: available)
    request.node.add_marker(pytest.mark.gpu)
    assert reasons_to_skip(request.node) == ([] if available else ["needs a CUDA device"])


def test_vllm_tests_need_vllm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    request.node.add_marker(pytest.mark.vllm)
    assert reasons_to_skip(request.node) == ["needs an environment with vLLM"]


def test_a_test_without_marks_runs(request: pytest.FixtureRequest) -> None:
    assert reasons_to_skip(request.node) == []
