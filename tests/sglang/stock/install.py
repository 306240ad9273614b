"""Sets up a stock SGLang on a machine without a GPU, in `.venv/sglang`, from the versions in `.ci/sglang.lock`.

The environment also sees the packages of `.venv/vllm`: torch's CPU build, transformers and most other packages of a server.
Requirements of packages are not installed, because they include CUDA. A second run changes nothing. This program needs
only Python's standard library.

    python3 tests/sglang/stock/install.py
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
LOCK = ROOT / ".ci" / "sglang.lock"
ENVIRONMENTS = (ROOT / ".venv").resolve()
BELOW = ENVIRONMENTS / "vllm"
TRITON = ENVIRONMENTS / "triton"
STAND_INS = ROOT / "tests" / "sglang" / "cpu_ops"
ENVIRONMENT = ENVIRONMENTS / "sglang"
PYTHON = ENVIRONMENT / "bin" / "python"
EXTENSIONS = ENVIRONMENT / "extensions"  # extensions that torch compiles for SGLang

COMPILE = (
    "from sglang.srt.mem_cache.cpp_utils.native_hash import get_native_hash; get_native_hash([1], None, 1)"
)


def main() -> int:
    """Install the locked versions in `.venv/sglang`, unless they are installed already."""
    if not (BELOW / "bin" / "python").exists():
        sys.stdout.write("It stands on the environment of a stock vLLM: make vllm-env comes first.\n")
        return 1
    recipe = b"".join(path.read_bytes() for path in (LOCK, Path(__file__), STAND_INS / "pyproject.toml"))
    fingerprint = f"{STAND_INS} {hashlib.sha256(recipe).hexdigest()}"
    done = ENVIRONMENT / "locked"
    if done.exists() and done.read_text() == fingerprint:
        return 0
    try:
        set_up()
    except subprocess.CalledProcessError as failed:
        return failed.returncode
    done.write_text(fingerprint)
    return 0


def set_up() -> None:
    sys.stdout.write("installing SGLang\n")
    sys.stdout.flush()
    python_below = BELOW / "bin" / "python"
    subprocess.run([python_below, "-m", "venv", "--without-pip", ENVIRONMENT], check=True)
    here, below = packages(ENVIRONMENT), packages(BELOW)
    # This file does not load the .pth files of vLLM's environment, whose entry points belong to vLLM's tests.
    (here / "below.pth").write_text(f"{below}\n{TRITON}\n")
    pins = [line for line in LOCK.read_text().splitlines() if not line.startswith("#")]
    quiet = ["--disable-pip-version-check", "--quiet", "--quiet"]
    pip: list[str | Path] = [python_below, "-m", "pip", *quiet, "--python", PYTHON]
    subprocess.run([*pip, "install", "--no-deps", "--upgrade", *pins], check=True)
    subprocess.run(
        [*pip, "install", "--no-deps", "--no-build-isolation", "--editable", STAND_INS], check=True
    )
    compiling = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "TORCH_EXTENSIONS_DIR": str(EXTENSIONS)}
    subprocess.run([PYTHON, "-W", "ignore", "-c", COMPILE], check=True, env=compiling)


def packages(environment: Path) -> Path:
    (folder,) = (environment / "lib").glob("python3*/site-packages")
    return folder


if __name__ == "__main__":
    sys.exit(main())
