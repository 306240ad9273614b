"""Fixtures for the tests on a stock vLLM. These modules are shared by the tests:

* `stock`: small models, and vLLM in this process or as a server, on a machine without a GPU (`cpu_ops`);
* `engine_rig`: an engine with the connector in this process, prompts, and the comparison of answers;
* `scenes`: what every kind of model and every version must survive;
* `tiers_rig`: engines with a disk or a store, in this process or in separate ones;
* `scheduler_rig`: the adapter's scheduler side without an engine;
* `deaths_rig` and `copy_gate`: engines that a test kills while it holds their copies;
* `serve/serve_rig`: `vllm serve` over HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.remote.servers import Bucket, Mooncake

if TYPE_CHECKING:
    from pathlib import Path

    from tests.vllm.engine_rig import Hands


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder for checkpoints. A checkpoint is created by the first test that needs it."""
    return tmp_path_factory.getbasetemp() / "checkpoints"


@pytest.fixture
def hands(engine: Hands) -> Iterator[Hands]:
    """Yield the module's `engine` with empty caches and without held copies. Check afterwards that nothing is
    left.
    """
    rig, held = engine
    rig.reported.clear()
    rig.forget()
    yield rig, held
    held.copier.release()
    rig.check_clean()


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    (folder := tmp_path / "bucket").mkdir()
    server = Bucket(folder)
    server.reach(monkeypatch)
    yield server
    server.close()


@pytest.fixture
def mooncake(tmp_path: Path) -> Iterator[Mooncake]:
    (folder := tmp_path / "mooncake").mkdir()
    server = Mooncake(folder)
    yield server
    server.close()


@pytest.fixture(params=["mooncake", "bucket"])
def url(request: pytest.FixtureRequest) -> str:
    """Run the test with each kind of remote tier; return its URL."""
    return str(request.getfixturevalue(request.param).url)
