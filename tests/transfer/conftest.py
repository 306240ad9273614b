"""Builds the emulated CUDA driver once per session, with gcc, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cuda_emulator import Emulator, build


@pytest.fixture(scope="session")
def cuda_library_path() -> Path:
    return build()


@pytest.fixture
def emulator(cuda_library_path: Path) -> Iterator[Emulator]:
    """Yield an emulator with two devices, whose streams run only when the test steps them."""
    emulator = Emulator(cuda_library_path)
    emulator.reset(stepped=True)
    yield emulator
    emulator.reset(stepped=True)  # this stops the emulator's own threads
