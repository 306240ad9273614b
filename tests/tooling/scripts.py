import importlib.util
import os
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load_script(name: str) -> ModuleType:
    """Import a script of .ci as a module, although the folder is not a package."""
    path = ROOT / ".ci" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"ci_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def unpacked_wheel() -> Path:
    """Return the folder into which the Makefile has unpacked the wheel built for this run."""
    folder = os.environ.get("KVOFFLOAD_WHEEL")
    if folder is None:
        pytest.skip("no wheel was built for this run: make test")
    return Path(folder)
