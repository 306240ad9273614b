"""Tests `vllm serve` with two workers and the connector over HTTP: answers, metrics, resets and shutdown."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.vllm.engine_rig import SLOT_BYTES
from tests.vllm.serve.serve_rig import (
    BLOCK,
    MARKS,
    ask,
    burst,
    check_log,
    check_nothing_is_left,
    check_same,
    connector,
    draw,
    draw_families,
    processes,
    shared_memory,
)
from tests.vllm.stock import checkpoints, client, engines
from tests.vllm.stock.client import settled
from tests.vllm.stock.engines import Answer, Server

pytestmark = MARKS

DEVICE_BLOCKS = 40  # room for 1,248 tokens; the prompts have thousands of tokens
OPTIONS = {
    **engines.TWO_WORKERS,
    "num_gpu_blocks_override": DEVICE_BLOCKS,
    "enable_prompt_tokens_details": True,
}
FAMILIES, LONE, LONG = draw_families(1), draw(2, 6, 500), draw(3, 2, 150)
LONG_ANSWER = 450
EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"


class Expected(NamedTuple):
    """The answers of an engine with one worker and without the connector."""

    families: list[Answer]
    lone: list[Answer]
    long: list[Answer]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Expected:
    with engines.in_process(checkpoint) as plain:
        counts = ((FAMILIES, 8), (LONE, 8), (LONG, LONG_ANSWER))
        return Expected(*(engines.generate(plain, prompts, count) for prompts, count in counts))


@pytest.fixture(scope="module")
def server(
    checkpoint: Path, expected: Expected, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Start the server that all tests but the last share. The second-to-last test shuts it down."""
    log = tmp_path_factory.mktemp("offloading") / "log"
    options = {**OPTIONS, "shutdown_timeout": 60}  # without a timeout, vLLM kills its workers at once
    with engines.serving(checkpoint, log, kv_transfer_config=connector(), **options) as running:
        yield running


def test_answers_equal_those_of_one_worker_without_the_connector(server: Server, expected: Expected) -> None:
    before = settled(server)
    assert server.complete("some text", 4)["choices"][0]["text"]
    for _ in range(3):
        check_same(ask(server, FAMILIES), expected.families)
    assert settled(server)(EXTERNAL_HITS) > before(EXTERNAL_HITS)


def test_metrics_agree_with_the_requests(server: Server, expected: Expected) -> None:
    before = settled(server)
    replies = ask(server, LONE * 2, at_once=1)
    check_same(replies, expected.lone * 2)
    after = settled(server)

    def grown(name: str, *labels: str) -> int:
        return after(name, *labels) - before(name, *labels)

    sent = sum(reply.prompt_tokens for reply in replies)
    found = sum(reply.cached_tokens for reply in replies)
    on_device = grown("vllm:prefix_cache_hits_total")
    on_host = found - on_device
    assert sent == sum(map(len, LONE)) * 2
    # when the prompts are sent again, all their whole blocks must be found
    assert found >= sum(len(prompt) // BLOCK * BLOCK for prompt in LONE)
    assert grown(EXTERNAL_HITS) == grown("kvoffload_lookup_tokens_total", "hit") == on_host > 0
    assert grown("kvoffload_lookup_tokens_total") == sent - on_device
    assert grown("kvoffload_lookup_blocks_total", "hit") == on_host // BLOCK
    assert grown("kvoffload_miss_blocks_total") == grown("kvoffload_lookup_blocks_total", "miss") > 0
    assert grown("kvoffload_load_blocks_total", "loaded") == on_host // BLOCK
    assert grown("kvoffload_transfer_bytes_total", "load") == on_host // BLOCK * SLOT_BYTES
    assert grown("kvoffload_store_blocks_total", "stored") >= sum(len(prompt) // BLOCK for prompt in LONE)
    assert after("kvoffload_slots") == after("kvoffload_capacity_slots") == 512
    assert after("kvoffload_degraded") == after("kvoffload_contract_violations_total") == 0
    # Each of the two ranks makes one copy per prompt.
    assert grown("kvoffload_transfer_seconds_count", "load") == 2 * len(LONE)
    assert grown("kvoffload_first_token_seconds_count") == len(replies)
    assert grown("kvoffload_first_token_seconds_count", "host") == len(LONE)
    assert grown("kvoffload_prompt_tokens_total") == grown("vllm:prompt_tokens_total") > 0
    assert not [at for at, value in after.series.items() if at[0].startswith("vllm:") and value < 0]


def test_after_a_reset_while_idle_no_earlier_block_is_found(server: Server, expected: Expected) -> None:
    ask(server, LONE)
    settled(server)
    assert server.post("/reset_prefix_cache?reset_external=true") == {"success": True}
    before = settled(server)
    check_same(ask(server, LONE), expected.lone)
    after = settled(server)
    for name in (EXTERNAL_HITS, "vllm:prefix_cache_hits_total"):
        assert after(name) == before(name)
    assert after("kvoffload_resets_total") == 1


def test_after_a_reset_during_requests_no_earlier_block_is_found(server: Server, expected: Expected) -> None:
    ask(server, LONE)
    control = settled(server)
    ask(server, LONE)
    assert settled(server)(EXTERNAL_HITS) > control(EXTERNAL_HITS)  # without a reset, the prompts are found

    # on a busy machine, the requests may end before the reset arrives
    assert any(reset_during_requests(server, expected) for _ in range(5))

    before = settled(server)
    check_same(ask(server, LONE), expected.lone)
    check_same(ask(server, LONG, LONG_ANSWER), expected.long)
    assert settled(server)(EXTERNAL_HITS) == before(EXTERNAL_HITS)
    check_same(ask(server, LONE), expected.lone)
    # blocks that were computed after the reset are found
    assert settled(server)(EXTERNAL_HITS) > before(EXTERNAL_HITS)


def reset_during_requests(server: Server, expected: Expected) -> bool:
    """Reset the caches when two long answers have begun. Return whether vLLM still used blocks for them."""
    with ThreadPoolExecutor(len(LONG)) as pool:
        begun = threading.Semaphore(0)
        running = [pool.submit(client.stream, server, prompt, LONG_ANSWER, begun.release) for prompt in LONG]
        assert all(begun.acquire(timeout=120) for _ in LONG)
        answer = server.post("/reset_prefix_cache?reset_external=true")
        check_same([one.result() for one in running], expected.long)
    return answer == {"success": False}


def test_a_server_stopped_during_copies_completes_its_requests_and_exits_cleanly(server: Server) -> None:
    assert any("Worker_TP1" in name for name in processes(server).values())
    shared = shared_memory(server)
    with burst(server) as replies:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(180) == 0
    # vLLM completes running requests before it exits.
    assert all(len(reply.result().tokens) == 4 for reply in replies)
    check_nothing_is_left(server, shared)
    check_log(server)
    assert "Traceback" not in server.log.read_text()


def test_a_killed_worker_ends_only_its_own_server(checkpoint: Path, tmp_path: Path) -> None:
    with engines.serving(checkpoint, tmp_path / "log", kv_transfer_config=connector(), **OPTIONS) as killed:
        shared = shared_memory(killed)
        (worker,) = (process for process, name in processes(killed).items() if "Worker_TP1" in name)
        with burst(killed, tokens=90) as replies:  # too many to end before the kill
            os.kill(worker, signal.SIGKILL)
            killed.process.wait(180)
        # some requests failed because the server shut down
        assert any(isinstance(reply.exception(), OSError) for reply in replies)
        check_nothing_is_left(killed, shared)
        check_log(killed)
