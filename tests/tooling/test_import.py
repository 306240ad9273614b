import os
import subprocess
import sys

import pytest

from tests.tooling.scripts import ROOT

# This program hides the blocked packages, then imports one module.
WITHOUT = """
import importlib, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"blocked: {{name}}", name=name)

sys.meta_path.insert(0, Blocker())
importlib.import_module({module!r})
"""


def run(program: str) -> str:
    """Run a Python program, which may import the tests; return its output."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


def import_without(module: str, *blocked: str) -> str:
    program = WITHOUT.format(module=module, blocked=set(blocked))
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False).stderr


def test_blocked_packages_cannot_be_imported() -> None:
    assert "blocked: numpy" in import_without("numpy", "numpy")


def test_the_package_needs_no_heavy_dependency() -> None:
    assert import_without("kvoffload", "numpy", "prometheus_client", "torch", "vllm") == ""


@pytest.mark.parametrize("module", ["kvoffload.model", "kvoffload.core"])
def test_model_and_core_need_only_the_standard_library_and_msgspec(module: str) -> None:
    blocked = ("anyio", "numpy", "prometheus_client", "structlog", "torch", "vllm")
    assert import_without(module, *blocked) == ""


SERVE = """
import sys
from kvoffload.engine import Engine, SamplingParams
from kvoffload.engine.plugin import load_plugin
from tests.engine.tiny import tiny_config

engine = Engine(tiny_config(plugin_config={"host_bytes": "1MiB"}), load_plugin("kvoffload"), clock=lambda: 0.0)
engine.submit(tuple(range(30)), SamplingParams(4))
while engine.has_work:
    engine.step()
engine.close()
assert "kvoffload.runtime.worker_side" in sys.modules
print(*[name for name in sys.modules if name.startswith(("kvoffload.cli", "kvoffload.gpu_check"))])
"""


@pytest.mark.slow
def test_an_engine_does_not_import_the_command_or_the_gpu_check() -> None:
    assert run(SERVE) == "\n"


def test_a_scheduler_without_spans_needs_no_opentelemetry() -> None:
    assert import_without("kvoffload.runtime.scheduler_side", "opentelemetry", "vllm") == ""
    assert "blocked: opentelemetry" in import_without("kvoffload.telemetry.otel", "opentelemetry")


def test_the_bus_needs_no_tensors_and_no_metrics() -> None:
    assert import_without("kvoffload.bus", "numpy", "prometheus_client", "torch", "vllm") == ""
