from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.cuda_emulator import Emulator, build
from tests.cuda_emulator.life import Life
from tests.transfer.rig import Rig, running


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


@pytest.fixture
def start(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Life]]:
    """Return a function that starts a rank. At the end of the test, all ranks are closed."""
    lives: list[Life] = []

    def started(seed: int = 1, device: int = 0, **options: object) -> Life:
        lives.append(Life(emulator, monkeypatch, seed, device, **options))  # type: ignore[arg-type]
        return lives[-1]

    yield started
    for life in lives:
        life.close()


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[Rig]:
    """Yield a pump whose coroutine is running."""
    rig = Rig()
    async with running(rig):
        yield rig
