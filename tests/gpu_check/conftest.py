from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cuda_emulator import Emulator, build


@pytest.fixture
def emulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulator]:
    library = build()
    monkeypatch.chdir(tmp_path)  # `gpu-check` writes its result to the working directory.
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    emulator = Emulator(library)
    emulator.reset(delay_us=0)
    yield emulator
    emulator.reset(stepped=True)
