"""Two `vllm serve` with one `host_path`: the second finds what the first has computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.serve.serve_rig import BLOCK, MARKS, ask, check_same, connector, draw
from tests.vllm.stock import checkpoints, engines
from tests.vllm.stock.client import settled
from tests.vllm.stock.engines import Server

pytestmark = MARKS

PROMPTS = draw(7, 6, 500)
EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"
FETCHED = "kvoffload_fetched_tokens_total"


def step_until_it_knows(server: Server, blocks: float) -> None:
    """Serve requests until the server knows so many blocks of its neighbours."""
    while server.metric("kvoffload_neighbour_blocks") < blocks:
        server.complete([1, 2, 3], 8)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.full), 1])
def test_a_second_server_finds_what_the_first_one_has_on_the_host(
    shared_memory: Path, tmp_path: Path, workers: int
) -> None:
    """At least 95 % of the tokens that the first one finds whose device cache was emptied."""
    checkpoint = checkpoints.make("qwen3", tmp_path / "qwen3")
    options: dict[str, Any] = {**(engines.TWO_WORKERS if workers == 2 else {}), "num_gpu_blocks_override": 60}
    options["enable_prompt_tokens_details"] = True
    config = connector(host_path=str(shared_memory))
    with (
        engines.serving(checkpoint, tmp_path / "first.log", kv_transfer_config=config, **options) as first,
        engines.serving(checkpoint, tmp_path / "second.log", kv_transfer_config=config, **options) as second,
    ):
        answers = ask(first, PROMPTS)
        settled(first)
        assert first.post("/reset_prefix_cache") == {"success": True}
        before = first.metric(EXTERNAL_HITS)
        # One at a time: the device has no room for all, and a request that vLLM preempts computes what it had found.
        check_same(ask(first, PROMPTS, at_once=1), answers)
        found = first.metric(EXTERNAL_HITS) - before
        assert found >= len(PROMPTS) * 400 // BLOCK
        step_until_it_knows(second, found / BLOCK)
        check_same(ask(second, PROMPTS, at_once=1), answers)
        assert second.metric(EXTERNAL_HITS) >= 0.95 * found
        assert second.metric(FETCHED) >= 0.95 * found
        assert not second.metric("kvoffload_node_lost_blocks_total")


@contextmanager
def four(host_path: Path, folder: Path) -> Iterator[list[Server]]:
    """Run four servers with one `host_path`, and wait until each has found the others."""
    checkpoint = checkpoints.make("qwen3", folder / "qwen3")
    options: dict[str, Any] = {"num_gpu_blocks_override": 60, "enable_prompt_tokens_details": True}
    options["kv_transfer_config"] = connector(host_path=str(host_path))
    with ExitStack() as running:
        servers = [
            running.enter_context(engines.serving(checkpoint, folder / f"log{number}", **options))
            for number in range(4)
        ]
        for server in servers:
            while server.metric("kvoffload_neighbours") < 3:
                server.complete([1, 2, 3], 8)
        yield servers


def check_rounds(servers: Sequence[Server]) -> None:
    """Send each prompt to each server in turn, and check what those find that have not computed it."""
    answers = [ask(servers[at % 4], [prompt])[0] for at, prompt in enumerate(PROMPTS)]
    for server in servers:
        settled(server)
    for server in servers:
        # The blocks that the others have stored of their prompts.
        own = sum(at % 4 == servers.index(server) for at in range(len(PROMPTS)))
        step_until_it_knows(server, (len(PROMPTS) - own) * (500 // BLOCK))
    found = 0
    for turn in range(1, 4):
        replies = [ask(servers[(at + turn) % 4], [prompt])[0] for at, prompt in enumerate(PROMPTS)]
        check_same(replies, answers)
        found += sum(reply.cached_tokens for reply in replies)
    assert found >= 0.95 * 3 * len(PROMPTS) * (500 // BLOCK * BLOCK)
    assert sum(server.metric(FETCHED) for server in servers) >= 0.95 * found
    assert not sum(server.metric("kvoffload_node_lost_blocks_total") for server in servers)


@pytest.mark.full
@pytest.mark.timeout(2400)
def test_four_servers_behind_a_client_that_takes_turns_find_each_others_blocks(
    shared_memory: Path, tmp_path: Path
) -> None:
    with four(shared_memory, tmp_path) as servers:
        check_rounds(servers)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_data_parallel_engines_of_one_server_find_each_others_blocks(
    shared_memory: Path, tmp_path: Path
) -> None:
    with engines.serving(
        checkpoints.make("qwen3", tmp_path / "qwen3"),
        tmp_path / "log",
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        data_parallel_size=2,
        num_gpu_blocks_override=60,
        enable_prompt_tokens_details=True,
        kv_transfer_config=connector(host_path=str(shared_memory)),
    ) as server:
        while server.metric("kvoffload_neighbours") < 2:
            server.complete([1, 2, 3], 8)
        answers = ask(server, PROMPTS)
        for _ in range(6):  # a prompt meets the other engine sooner or later
            settled(server)
            assert server.post("/reset_prefix_cache") == {"success": True}
            check_same(ask(server, PROMPTS), answers)
        assert server.metric(FETCHED) > 0
        assert not server.metric("kvoffload_node_lost_blocks_total")
