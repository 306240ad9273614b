from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BESIDE = ROOT / ".venv" / "triton"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None and not BESIDE.is_dir(),
    reason="needs Triton, 200 MB: make kernel-env",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "interpreted"), [("interpret", "1"), pytest.param("compile", "0", marks=pytest.mark.full)]
)
def test_the_kernel_passes_its_checks_in_the_interpreter_and_compiled(
    what: str, interpreted: str, tmp_path: Path
) -> None:
    settings = {"TRITON_INTERPRET": interpreted, "TRITON_CACHE_DIR": str(tmp_path)}
    run("page_kernel_checks", what, settings)


@pytest.mark.full
@pytest.mark.slow
def test_the_kernel_runs_with_tritons_compiler_and_launcher(cuda_library_path: Path, tmp_path: Path) -> None:
    settings = {
        "LD_LIBRARY_PATH": str(cuda_library_path.parent),
        "TRITON_LIBCUDA_PATH": str(cuda_library_path.parent),
        "TRITON_CACHE_DIR": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path),
    }
    run("page_kernel_on_emulator", str(cuda_library_path), settings)


def run(module: str, argument: str, settings: dict[str, str]) -> None:
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT), str(BESIDE)]))
    ended = subprocess.run(
        [sys.executable, "-m", f"tests.transfer.{module}", argument],
        env={**os.environ, "PYTHONPATH": path, **settings},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
