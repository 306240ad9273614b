"""Starts one real remote tier of each kind, which all tests share, except tests that break one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.remote.servers import Bucket, Mooncake
from tests.remote.sharing import Served, StartEngine


@pytest.fixture(scope="session")
def mooncake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mooncake]:
    server = Mooncake(tmp_path_factory.mktemp("mooncake"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    server = Bucket(tmp_path_factory.mktemp("bucket"))
    yield server
    server.close()


@pytest.fixture(params=["mooncake", "bucket"])
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test with each kind of remote tier; return its URL. The credentials are in the environment."""
    server: Mooncake | Bucket = request.getfixturevalue(request.param)
    if isinstance(server, Bucket):
        server.reach(monkeypatch)
    return server.url


@pytest.fixture
def start() -> Iterator[StartEngine]:
    with ExitStack() as running:

        def begin(url: str, kind: str = "full", **settings: object) -> Served:
            made = Served(url, kind, **settings)  # type: ignore[arg-type]
            running.callback(made.engine.close)
            return made

        yield begin
