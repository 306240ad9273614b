"""Each layer contract fails if its rule is broken, in a copy of the sources."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tooling.scripts import ROOT

pytestmark = pytest.mark.slow  # each test reads all sources

LINT = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "kvoffload", tmp_path / "kvoffload", ignore=ignore)
    shutil.copytree(ROOT / "plugins", tmp_path, ignore=ignore, dirs_exist_ok=True)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def lint(folder: Path) -> str:
    command = [sys.executable, "-c", LINT]
    environment = {"PYTHONPATH": str(folder), "PATH": "", "COLUMNS": "200"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    ).stdout


def test_the_sources_keep_every_contract(sources: Path) -> None:
    assert " 0 broken" in lint(sources)


@pytest.mark.parametrize(
    ("module", "statement", "contract"),
    [
        ("kvoffload/model", "import kvoffload.core", "Imports point down"),
        ("kvoffload/bus", "import kvoffload.transfer", "Imports point down"),
        ("kvoffload/transfer", "from kvoffload import telemetry", "Imports point down"),
        ("kvoffload/telemetry", "from kvoffload import transfer", "Imports point down"),
        ("kvoffload/runtime", "import kvoffload.cli", "Imports point down"),
        ("kvoffload/checks", "import kvoffload.runtime", "Imports point down"),
        ("kvoffload/engine", "import kvoffload.model", "The reference engine knows nothing"),
        ("kvoffload/runtime", "import kvoffload.engine", "Only the command and the adapters"),
        ("kvoffload/cli", "import kvoffload_reference", "Adapters stand on top"),
        ("kvoffload_reference/plugin.py", "import kvoffload.cli.main", "An engine imports"),
        ("kvoffload_vllm/register.py", "import kvoffload_vllm.gpu_check", "An engine imports"),
        ("kvoffload_reference", "import vllm.config", "Only vLLM's adapter"),
        ("kvoffload/core", "import time", "are pure"),
        ("kvoffload/model", "import torch", "are pure"),
    ],
)
def test_a_wrong_import_breaks_its_contract(
    sources: Path, module: str, statement: str, contract: str
) -> None:
    path = sources / module
    with (path if path.suffix else path / "__init__.py").open("a") as file:
        file.write(f"\n{statement}\n")
    said = lint(sources)
    assert any(contract in line and "BROKEN" in line for line in said.splitlines()), said


def test_a_new_package_must_say_where_it_stands(sources: Path) -> None:
    (sources / "kvoffload" / "afterthought").mkdir()
    (sources / "kvoffload" / "afterthought" / "__init__.py").touch()
    assert "kvoffload.afterthought" in lint(sources)
