"""Starts one real remote tier of each kind, which all tests share, except tests that break one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.remote.http_servers import S3Server
from tests.remote.servers import Bucket, Mooncake, Moto, Reached
from tests.remote.sharing import Sharer, StartEngine


@pytest.fixture(scope="session")
def mooncake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mooncake]:
    with closing(Mooncake(tmp_path_factory.mktemp("mooncake"))) as server:
        yield server


@pytest.fixture(scope="session")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    with closing(Bucket(tmp_path_factory.mktemp("bucket"))) as server:
        yield server


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Moto]:
    with closing(Moto(tmp_path_factory.mktemp("moto"))) as server:
        yield server


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with closing(S3Server()) as made:
        made.reach(monkeypatch)
        yield made


@pytest.fixture
def own_mooncake(tmp_path: Path) -> Iterator[Callable[..., Mooncake]]:
    """Yield a function that starts a Mooncake server which the test may break."""
    with ExitStack() as running:

        def begin(*options: object, **sizes: int) -> Mooncake:
            return running.enter_context(closing(Mooncake(tmp_path, *options, **sizes)))

        yield begin


@pytest.fixture(params=["mooncake", "bucket", "moto"])
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test with each kind of remote tier; return its URL. The credentials are in the environment."""
    server: Mooncake | Bucket | Moto = request.getfixturevalue(request.param)
    if isinstance(server, Reached):
        server.reach(monkeypatch)
    return server.url


@pytest.fixture
def start() -> Iterator[StartEngine]:
    with ExitStack() as running:

        def begin(url: str, kind: str = "full", **settings: object) -> Sharer:
            made = Sharer(url, kind, **settings)  # type: ignore[arg-type]
            running.callback(made.engine.close)
            return made

        yield begin
