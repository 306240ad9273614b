import importlib.util
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from ctypes.util import find_library
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from kvoffload.cli.signals import HANDLED
from tests.mounts import page_pool

# Property tests have no time limits, which would measure the machine and not the code.
common = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("fast", common, max_examples=30, stateful_step_count=30)
settings.register_profile("ci", common, max_examples=50, derandomize=True)
settings.register_profile("full", common, max_examples=200, derandomize=True)
settings.register_profile("deep", common, max_examples=5000, stateful_step_count=100)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))

# Tests must not send spans to a collector that the environment names.
os.environ.pop("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", None)

# If a script started this run in the background, this process and its children ignore SIGINT. Tests of Ctrl-C
# need the default handler.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def signals_are_as_before() -> Iterator[None]:
    """Restore the signal handlers after a test has run a command in this process."""
    handlers = {number: signal.getsignal(number) for number in HANDLED}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    """Yield an empty folder on a tmpfs."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture
def huge_pages() -> Iterator[Path]:
    """Yield an empty folder on a hugetlbfs."""
    with page_pool() as folder:
        yield folder


@pytest.hookimpl(trylast=True)  # after Hypothesis has marked its tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give property tests ten minutes, because their many examples take as long as the machine is busy."""
    for item in items:
        if item.get_closest_marker("hypothesis") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(600))


def pytest_runtest_setup(item: pytest.Item) -> None:
    for reason in reasons_to_skip(item):
        pytest.skip(reason)


def reasons_to_skip(item: pytest.Item) -> list[str]:
    reasons = []
    if item.get_closest_marker("gpu") and not _has_cuda():
        reasons.append("needs a CUDA device")
    if item.get_closest_marker("vllm") and importlib.util.find_spec("vllm") is None:
        reasons.append("needs an environment with vLLM")
    if item.get_closest_marker("sglang") and importlib.util.find_spec("sglang") is None:
        reasons.append("needs an environment with SGLang")
    needed = [name for mark in item.iter_markers("tools") for name in mark.args]
    missing = [name for name in needed if shutil.which(name) is None and find_library(name) is None]
    if missing:
        reasons.append(f"needs {', '.join(missing)}: make tools")
    return reasons


def _has_cuda() -> bool:
    import torch  # torch is imported here, so that only runs with GPU tests wait for the import

    return torch.cuda.is_available()
