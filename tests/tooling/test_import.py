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


def import_without(module: str, *blocked: str) -> str:
    program = WITHOUT.format(module=module, blocked=set(blocked))
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False).stderr


HEAVY = ("numpy", "prometheus_client", "torch", "vllm")
ONLY_MSGSPEC = (*HEAVY, "anyio", "structlog")


@pytest.mark.parametrize(
    ("module", "blocked"),
    [
        ("kvoffload", HEAVY),
        ("kvoffload.model", ONLY_MSGSPEC),
        ("kvoffload.core", ONLY_MSGSPEC),
        ("kvoffload.bus", HEAVY),
        ("kvoffload.runtime.scheduler_side", ("opentelemetry", "vllm")),
    ],
)
def test_a_package_does_not_need_heavy_dependencies(module: str, blocked: tuple[str, ...]) -> None:
    assert import_without(module, *blocked) == ""


@pytest.mark.parametrize(
    ("module", "needs"), [("numpy", "numpy"), ("kvoffload.telemetry.otel", "opentelemetry")]
)
def test_a_module_that_needs_a_blocked_package_cannot_be_imported(module: str, needs: str) -> None:
    assert f"blocked: {needs}" in import_without(module, needs)


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
    # The program imports the tests too.
    paths = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT)])
    command, environment = [sys.executable, "-c", SERVE], {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "\n"
