from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.remote.servers import Bucket
from tests.sglang.prompts import Prompts
from tests.sglang.stock.engines import Server, serving
from tests.sglang.stock.install import BELOW
from tests.vllm.stock.checkpoints import make

# the programs of vLLM's environment, such as the S3 server
os.environ["PATH"] += f"{os.pathsep}{BELOW / 'bin'}"


@pytest.fixture(scope="session")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    server = Bucket(tmp_path_factory.mktemp("bucket"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("qwen3", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, bucket: Bucket, model: Path) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("sglang") / "log"
    with serving(model, log, environment=bucket.environment) as started:
        yield started


@pytest.fixture
def some(server: Server) -> Prompts:
    """Return prompts that are in no cache, and the tokens that the server generates without our backend."""
    server.flush()
    return Prompts.answered_by(server)
