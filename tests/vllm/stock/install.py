"""Sets up a stock vLLM on a machine without a GPU, in `.venv/vllm`, from the versions in `.ci/vllm.lock`.

The environment has torch's CPU build, the lock's vLLM and this project. For each further version, a folder
`.venv/vllm-overlays/<version>` has only that version's Python files, for `PYTHONPATH`. pip ignores the
packages' requirements, so that it downloads no CUDA packages; the lock lists every needed package. A second
run changes nothing. This script needs only Python's standard library.

    python3 tests/vllm/stock/install.py [--versions 0.28.0 0.33.0] [--torch-index URL]
"""

from __future__ import annotations

import argparse
import compileall
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
LOCK = ROOT / ".ci" / "vllm.lock"
ENVIRONMENT = ROOT / ".venv" / "vllm"
OVERLAYS = ROOT / ".venv" / "vllm-overlays"
TRITON = ROOT / ".venv" / "triton"
PYTHON = ENVIRONMENT / "bin" / "python"
OURS = (ROOT / "tests" / "vllm" / "cpu_ops", ROOT)

CHECK = """
import sys, torch
if torch.version.cuda:
    sys.exit("This torch is built for CUDA. Name an index with the CPU build: --torch-index URL")
"""


def pins() -> list[str]:
    """Return the lock's packages as `name==version`."""
    return [line for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]


def overlay_versions() -> list[str]:
    """Return the versions of vLLM in the lock, without the version that is installed completely."""
    return re.findall(r"^# overlay (\S+)$", LOCK.read_text(), flags=re.MULTILINE)


def set_up_environment(torch_index: str | None) -> None:
    """Make `.venv/vllm` match the lock. If it already does, do nothing."""
    fingerprint = _digest(LOCK.read_text())
    done = ENVIRONMENT / "locked"
    if done.exists() and done.read_text() == fingerprint:
        return
    if not PYTHON.exists():
        _say(f"making {ENVIRONMENT.relative_to(ROOT)}")
        venv.create(ENVIRONMENT, with_pip=True)
    (torch,) = (pin for pin in pins() if pin.startswith("torch=="))
    others = [pin for pin in pins() if pin != torch]
    _say(f"installing {torch}")
    _pip("install", "--no-deps", torch, *(["--index-url", torch_index] if torch_index else []))
    _say(f"installing vLLM and {len(others) - 1} more packages")
    _pip("install", "--no-deps", *others)
    subprocess.run([PYTHON, "-c", CHECK], check=True)
    done.write_text(fingerprint)


def set_up_project() -> None:
    """Make this project's sources and entry points importable in the environment."""
    for folder in OURS:
        pyproject = folder / "pyproject.toml"
        done = ENVIRONMENT / f"editable-{folder.name}"
        fingerprint = _digest(pyproject.read_text())
        if not done.exists() or done.read_text() != fingerprint:
            _say(f"linking {folder.name if folder != ROOT else 'this project'}")
            _pip("install", "--no-deps", "--no-build-isolation", "--editable", str(folder))
            done.write_text(fingerprint)


def set_up_overlay(version: str) -> None:
    """Unpack the Python files of another vLLM version to a folder. If the folder exists, keep it."""
    target = OVERLAYS / version
    if not target.exists():
        OVERLAYS.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=OVERLAYS) as scratch:
            _say(f"fetching vLLM {version}")
            _pip("download", "--no-deps", "--only-binary=:all:", "--dest", scratch, f"vllm=={version}")
            (wheel,) = Path(scratch).glob("vllm-*.whl")
            unpacked = Path(scratch) / version
            _unpack(wheel, unpacked)
            unpacked.rename(target)
    _describe(target, version)


def _unpack(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith("vllm/") and name.endswith(".py")]
        archive.extractall(target, names)
    compileall.compile_dir(target, quiet=2, workers=0, stripdir=str(target))


def _describe(target: Path, version: str) -> None:
    """Write the metadata from which vLLM reads its version.

    Up to 0.27, vLLM only chooses its CPU platform if its version contains "cpu". Later versions with "cpu" in
    their name accept only a Triton for CPUs.
    """
    build = "+cpu" if tuple(map(int, version.split(".")[:2])) <= (0, 27) else ""
    about = target / f"vllm-{version}.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}{build}\n")


def _pip(*arguments: str) -> None:
    # Show pip's errors, but not its messages about missing requirements.
    quiet = ["--disable-pip-version-check", "--quiet", "--quiet"]
    subprocess.run(
        [PYTHON, "-m", "pip", *quiet, *arguments], check=True, env={**os.environ, "PIP_NO_INPUT": "1"}
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _say(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description="set up a stock vLLM on a machine without a GPU")
    parser.add_argument("--versions", nargs="*", default=[], help="further versions, or 'all' of the lock's")
    parser.add_argument("--torch-index", help="the package index that has torch's CPU build")
    parser.add_argument("--fresh", action="store_true", help="begin by removing what is there")
    asked = parser.parse_args()
    if asked.fresh:
        shutil.rmtree(ENVIRONMENT, ignore_errors=True)
        shutil.rmtree(OVERLAYS, ignore_errors=True)
    try:
        set_up_environment(asked.torch_index)
        set_up_project()
        for version in overlay_versions() if asked.versions == ["all"] else asked.versions:
            set_up_overlay(version)
    except subprocess.CalledProcessError as failed:
        return failed.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
