"""Checks that a real remote tier's failures cost only hits: no token is wrong, and no request or shutdown
waits too long.

`Sharer.run` compares every answer with the answer of an engine without offloading.
"""

from __future__ import annotations

import itertools
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import obstore
import pytest
from obstore.store import S3Store

from kvoffload.model.causes import TierOutcome
from kvoffload.model.errors import RemoteError
from kvoffload.model.wire import Direction
from kvoffload.remote.address import MooncakeAddress
from kvoffload.remote.local import Server
from kvoffload.remote.mooncake import own_address
from kvoffload.remote.values import TRAILER_BYTES, Shard
from kvoffload.runtime import remote_catalog
from kvoffload.telemetry.catalogue import TierState
from tests.captured_logs import capture_logs
from tests.reference.rig import BLOCK, slot_bytes, text
from tests.remote.http_servers import Proxy
from tests.remote.servers import Bucket, Mooncake, SecureBucket, resume, suspend
from tests.remote.sharing import PATIENCE_S, Sharer, StartEngine

if TYPE_CHECKING:
    from mooncake.store import MooncakeDistributedStore

StartMooncake = Callable[..., Mooncake]
LOAD, STORE = Direction.LOAD, Direction.STORE
SIZE = slot_bytes("full") + TRAILER_BYTES
TIMEOUT_S = 1.5
# The limit is far above what a test needs, because the machine may be busy.
pytestmark = pytest.mark.timeout(240)
PROMPTS = [text(seed, 10 * BLOCK) for seed in range(10, 14)]


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines notice a failing remote tier quickly even without requests, and list new packs at once."""
    monkeypatch.setattr(remote_catalog, "LOOK_PERIOD_S", 0.05)
    monkeypatch.setattr("kvoffload.remote.bucket.LOOK_PERIOD_S", 0.0)


@pytest.fixture
def proxy(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Route the requests of all engines to the bucket through a proxy; return the proxy."""
    bucket.reach(monkeypatch)
    with closing(Proxy(bucket.port)) as made:
        monkeypatch.setenv("AWS_ENDPOINT", made.endpoint)
        yield made
        made.restore()


def meet(first: Sharer, second: Sharer) -> None:
    """Serve other prompts until the second engine finds blocks that the first engine has shared."""
    had, ends = second.copied(LOAD), time.monotonic() + 3 * PATIENCE_S
    for seed in itertools.count(100):
        assert time.monotonic() < ends
        for engine in (first, second):
            engine.until(TierState.OPEN)
        for engine in (first, first, second):
            engine.run(text(seed, 10 * BLOCK))
        if second.copied(LOAD) > had:
            return


def check_gone_and_back(
    first: Sharer, second: Sharer, fail: Callable[[], object], restore: Callable[[], object]
) -> list[dict[str, Any]]:
    """Check that engines share blocks before and after a failure of the remote tier; return the log lines."""
    for prompt in PROMPTS[:2]:
        first.share(prompt)
    second.find(PROMPTS[0])
    loaded = second.copied(LOAD)
    with capture_logs() as lines:
        fail()
        second.run(PROMPTS[1])
        for engine in (first, second):
            engine.until(TierState.FAILING)
            engine.run(PROMPTS[2])
        assert second.copied(LOAD) == loaded
        restore()
        meet(first, second)
    events = [line["event"] for line in lines]
    assert events.count("remote_fails") >= 2
    assert events.count("remote_works") >= 2
    return lines


@pytest.mark.parametrize(
    ("what", "reason", "kind"),
    [
        ("refused", "", "unreachable"),
        pytest.param("cut", "", "unreachable", marks=pytest.mark.full),
        # A hanging call may also be ended by the client's own time limit.
        pytest.param("silent", "has not returned|Timeout", "timeout", marks=pytest.mark.full),
        pytest.param("unavailable", "503", "other", marks=pytest.mark.full),
    ],
)
def test_r17_a_failing_bucket_is_not_called_until_it_works_again(
    start: StartEngine, proxy: Proxy, bucket: Bucket, what: str, reason: str, kind: str
) -> None:
    first, second = (
        start("s3://blocks/kvoffload", remote_timeout_s=TIMEOUT_S, weights_id=what).opened() for _ in range(2)
    )

    def fail() -> None:
        proxy.cuts = what in ("refused", "cut")
        proxy.gate = threading.Event() if what == "silent" else None
        proxy.refuse = lambda _: {"refused": 0, "unavailable": 503}.get(what)

    lines = check_gone_and_back(first, second, fail, proxy.restore)
    assert re.search(reason, " ".join(str(line.get("reason")) for line in lines))
    assert errors(second)[kind] > 0, errors(second)
    assert not any(secret in str(lines) for secret in bucket.secrets)


def test_r17_a_slow_bucket_is_used_within_its_time_limit(start: StartEngine, proxy: Proxy) -> None:
    first, second = (start("s3://blocks/kvoffload", weights_id="slow").opened() for _ in range(2))
    proxy.seconds = 0.2
    first.share()
    second.find()
    assert second.tier is TierState.OPEN


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("kill", "node"),
        pytest.param("kill", "master", marks=pytest.mark.full),
        pytest.param("stop", "node", marks=pytest.mark.full),
        pytest.param("stop", "master", marks=pytest.mark.full),
    ],
)
def test_r17_failing_mooncake_is_not_called_until_it_works_again(
    start: StartEngine, own_mooncake: StartMooncake, what: str, how: str
) -> None:
    server = own_mooncake("--client_ttl", 1)

    def fail() -> None:
        process: Server = getattr(server, what)
        process.kill() if how == "kill" else suspend(process)

    def restore() -> None:
        getattr(server, f"start_{what}")() if how == "kill" else resume(getattr(server, what))

    first, second = (start(server.url, remote_timeout_s=TIMEOUT_S).opened() for _ in range(2))
    check_gone_and_back(first, second, fail, restore)
    fail()
    second.run(PROMPTS[3])
    began = time.monotonic()
    second.offload.reset()
    second.engine.close()
    assert time.monotonic() - began < PATIENCE_S  # the client alone would take up to a minute for each call


@pytest.mark.timeout(120)
def test_r17_an_engine_started_with_a_suspended_master_serves_and_shares_once_the_master_works(
    start: StartEngine, own_mooncake: StartMooncake
) -> None:
    server = own_mooncake()
    suspend(server.master)
    with pytest.raises(RemoteError, match="no Mooncake master answers at"):
        own_address(MooncakeAddress("127.0.0.1", server.port), 0.2)
    engine = start(server.url, remote_timeout_s=0.2)
    engine.run()
    resume(server.master)
    engine.opened().share()


def test_r17_a_full_mooncake_store_refuses_puts_and_serves_gets(
    start: StartEngine, own_mooncake: StartMooncake
) -> None:
    # With nodes of this size, Mooncake evicts nothing.
    server = own_mooncake("--default_kv_lease_ttl", 60_000, node_bytes=2**24)
    first, second = (start(server.url).opened() for _ in range(2))
    first.share(PROMPTS[0])
    second.find(PROMPTS[0])  # this read gives the blocks a lease, so Mooncake cannot evict them
    check_refused(first, "-200", filled(server))
    assert errors(first)["full"] >= 2
    start(server.url).opened().find(PROMPTS[0])


@pytest.mark.parametrize("status", [403, 507])
def test_r17_a_full_or_read_only_bucket_is_read(start: StartEngine, proxy: Proxy, status: int) -> None:
    first, second = (start("s3://blocks/kvoffload", weights_id=f"full {status}").opened() for _ in range(2))
    first.share(PROMPTS[0])
    proxy.refuse = lambda method: status if method == "PUT" else None
    check_refused(first, str(status), new_prompts())
    assert errors(first)[{403: "denied", 507: "full"}[status]] >= 2
    second.find(PROMPTS[0])
    proxy.restore()
    first.share(PROMPTS[2])


def errors(engine: Sharer) -> dict[str, float]:
    """Return the number of errors by kind, summed over the scheduler's side and all ranks."""
    series = engine.offload.gauges()["kvoffload_remote_errors_total"]
    return {kind: number for (kind,), number in series.items()}


def check_refused(engine: Sharer, reason: str, prompts: Iterator[Sequence[int]]) -> None:
    """Check that the remote tier refuses blocks, that one line logs this, and that the tier stays open."""
    with capture_logs() as lines:
        for _ in range(2):
            had = engine.copied(STORE, TierOutcome.FAILED)
            engine.run_until(prompts, lambda had=had: engine.copied(STORE, TierOutcome.FAILED) > had)  # type: ignore[misc]
    refusals = [line["reason"] for line in lines if line["event"] == "remote_write_refused"]
    assert len(refusals) == 1
    assert reason in refusals[0]
    engine.until(TierState.OPEN)


def new_prompts() -> Iterator[Sequence[int]]:
    for seed in itertools.count(20):
        yield text(seed, 10 * BLOCK)


def filled(server: Mooncake) -> Iterator[Sequence[int]]:
    """Yield new prompts, and fill Mooncake before each: it may have evicted blocks that were not read yet.

    The objects are pinned, so they are never evicted. They leave no room for a block.
    """
    from mooncake.store import ReplicateConfig

    pinned = ReplicateConfig()
    pinned.with_hard_pin = True
    with closing(other_writer(server)) as store:
        for prompt in new_prompts():
            size = 2**20
            while size > SIZE // 2:
                if store.put(secrets.token_hex(8), bytes(size), pinned) != 0:
                    size //= 2
            yield prompt


def other_writer(server: Mooncake) -> MooncakeDistributedStore:
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 2**24, "tcp", "", f"127.0.0.1:{server.port}") == 0
    return store


def test_r17_a_read_fails_if_its_lease_ends(start: StartEngine, own_mooncake: StartMooncake) -> None:
    server = own_mooncake("--default_kv_lease_ttl", 1000)
    first, second = (start(server.url).opened() for _ in range(2))
    # On a busy machine, a read may begin so late that its lease has not ended yet when the node goes on.
    for prompt, pause_s in zip(PROMPTS, (1.5, 2.5, 3.5, 4.5), strict=True):
        first.share(prompt)
        had = second.copied(LOAD)
        suspend(server.node)
        later = threading.Timer(pause_s, resume, (server.node,))
        later.start()
        second.run(prompt)
        later.join()
        if second.copied(LOAD) == had:
            break
    assert second.copied(LOAD) == had
    assert second.copied(LOAD, TierOutcome.FAILED) > 0
    assert second.tier is TierState.OPEN
    for seed in range(3):  # on a busy machine, a lease may end during these reads, too
        prompt = text(seed, 10 * BLOCK)
        first.share(prompt)
        second.run(prompt)
        if second.copied(LOAD) > had:
            break
    assert second.copied(LOAD) > had


def test_r17_values_of_another_writer_in_mooncake_are_not_used(
    start: StartEngine, own_mooncake: StartMooncake
) -> None:
    server = own_mooncake("--default_kv_lease_ttl", 500)
    first, second = (start(server.url).opened() for _ in range(2))
    first.share()
    remote, shard = first.offload.state.asked, Shard(first.namespace, 0, 1)
    assert remote is not None
    writer = other_writer(server)
    for name in [shard.name(key) for key, _ in remote.pool.index.items()]:
        while writer.remove(name) != 0:
            pass  # the lease has not ended yet
        assert writer.put(name, secrets.token_bytes(SIZE)) == 0
    writer.close()
    check_corrupt(second)


def test_r17_values_of_another_writer_in_a_bucket_are_not_used(
    start: StartEngine, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.reach(monkeypatch)
    first, second = (start(bucket.url, weights_id="values").opened() for _ in range(2))
    first.share()
    there = S3Store("blocks", prefix="kvoffload")
    [pages] = obstore.list(there, f"kvo1/{first.namespace}/")
    for entry in pages:
        pack = bytes(obstore.get(there, entry["path"]).bytes())
        index_size = int(entry["path"].rpartition("-")[2])
        obstore.put(there, entry["path"], pack[:index_size] + secrets.token_bytes(len(pack) - index_size))
    check_corrupt(second)


def check_corrupt(engine: Sharer) -> None:
    engine.run()
    assert engine.copied(LOAD) == 0
    assert engine.copied(LOAD, TierOutcome.CORRUPT) > 0
    assert engine.tier is TierState.OPEN


def test_r17_with_an_untrusted_certificate_the_tier_is_not_used(
    start: StartEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(SecureBucket(tmp_path)) as server:
        server.reach(monkeypatch)
        check_not_used(start(server.url), "UnknownIssuer")
        monkeypatch.setenv("SSL_CERT_FILE", str(server.certificate))
        start(server.url).opened().share()


def test_r17_with_refused_credentials_the_tier_is_not_used_and_no_secret_is_logged(
    start: StartEngine, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.reach(monkeypatch)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong" * 5)
    lines = check_not_used(start(bucket.url), "403")
    assert not any(secret in str(lines) for secret in (*bucket.secrets, "wrong"))


def check_not_used(engine: Sharer, reason: str) -> list[dict[str, Any]]:
    """Check that the engine cannot open the tier and serves without it; return the log lines."""
    with capture_logs() as lines:
        engine.step_until(lambda: [line["event"] for line in lines].count("remote_fails") == 2)
        engine.run()
    assert all(reason in line["reason"] for line in lines if line["event"] == "remote_fails")
    assert engine.tier is TierState.OPENING
    return lines
