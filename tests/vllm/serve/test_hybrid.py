"""Tests `vllm serve` with sliding windows, one worker and the connector, while a real Prometheus scrapes it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version

import pytest

from dashboards.observe.checks import check_panels, check_rules, firing, wait_for_scrape
from dashboards.observe.prometheus import run_prometheus, wait_for
from kvoffload_vllm.support import release_of
from tests.vllm.serve.serve_rig import (
    MARKS,
    ask,
    check_log,
    check_nothing_is_left,
    check_same,
    connector,
    draw,
    draw_families,
    shared_memory,
)
from tests.vllm.stock import checkpoints, engines
from tests.vllm.stock.client import settled
from tests.vllm.stock.engines import Answer, Server

pytestmark = MARKS

DEVICE_BLOCKS = 72
HOST_BLOCKS = 512
PROMPTS = [*draw_families(5), *draw(6, 4, 500)]
COUNT = 8
ENGINES_OWN = [  # The traffic must be visible in these series of vLLM.
    "vllm:external_prefix_cache_hits_total",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
    "vllm:time_to_first_token_seconds_bucket",
]
# Send prompts for at least `LEAST_S` seconds, so that Prometheus's rates show the traffic.
LEAST_S, MOST_S = 12, 240


@dataclass(frozen=True)
class Served:
    """The server of this module, and the answers of an engine without the connector."""

    server: Server
    expected: list[Answer]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Start the server. At the end, stop it, and check that it leaves nothing behind."""
    folder = tmp_path_factory.mktemp("hybrid")
    checkpoint = checkpoints.make("gemma3", folder / "gemma3")
    with engines.in_process(checkpoint) as plain:
        expected = [engines.generate(plain, [prompt], COUNT)[0] for prompt in PROMPTS]

    with engines.serving(
        checkpoint,
        folder / "log",
        num_gpu_blocks_override=DEVICE_BLOCKS,
        enable_prompt_tokens_details=True,
        kv_transfer_config=connector(HOST_BLOCKS),
    ) as server:
        shared = shared_memory(server)
        yield Served(server, expected)
        assert server.stop() == 0
        check_nothing_is_left(server, shared)
        check_log(server)


def test_answers_equal_those_of_an_engine_without_the_connector(served: Served) -> None:
    server = served.server
    rounds = [ask(server, PROMPTS) for _ in range(3)]
    for replies in rounds:
        assert [reply.tokens for reply in replies] == [answer.tokens for answer in served.expected]
        check_same(replies, rounds[0])
    after = settled(server)
    found = sum(reply.cached_tokens for replies in rounds for reply in replies)
    hits = after("vllm:external_prefix_cache_hits_total")
    assert 0 < hits <= found
    assert after("kvoffload_load_blocks_total", "loaded") == after("kvoffload_load_scheduled_blocks_total")
    assert after("kvoffload_degraded") == after("kvoffload_contract_violations_total") == 0
    assert not {at for at, value in after.series.items() if at[0].startswith("vllm:") and value < 0}


@pytest.mark.tools("prometheus")
def test_every_query_of_the_dashboards_returns_a_valid_result(served: Served) -> None:
    address = served.server.root.removeprefix("http://")
    with run_prometheus([address]) as prometheus:
        start = time.time()
        wait_for_scrape(prometheus, [address])
        evict_and_return(served.server)
        wait_for_scrape(prometheus, [address])
        panels = list(check_panels(prometheus, start, time.time()))
        lacked = 'tier="(node|disk|remote)"|kvoffload_fetch'  # this server has no lower tier
        if release_of(version("vllm")) < (0, 32):
            lacked += "|vllm:num_requests_kv_fetch_by_stage"
        missing = [one for one in panels if one.problem and not one.where.startswith("tiers: ")]
        assert [one for one in missing if not re.search(lacked, one.expr)] == []
        for name in ENGINES_OWN:
            found = [one for one in panels if name in one.expr]
            assert found
            assert all(one.is_active for one in found), name
        assert prometheus.query("sum(kvoffload_evicted_blocks_total)")[0].values[0] > 0
        wait_for(
            "every rule to be evaluated, and to record",
            lambda: not [one for one in check_rules(prometheus) if one.problem],
        )
        assert firing(prometheus) == []


def evict_and_return(server: Server) -> None:
    """Send prompts, each twice, until the host has evicted blocks and at least `LEAST_S` seconds have passed."""
    begun, seed = time.monotonic(), 100
    evicted = server.metric("kvoffload_evicted_blocks_total")
    while time.monotonic() < begun + LEAST_S or server.metric("kvoffload_evicted_blocks_total") == evicted:
        assert time.monotonic() < begun + MOST_S, "the host has room for all of it"
        prompts = draw(seed, 6, 500)
        for _ in range(2):
            ask(server, prompts, COUNT)
        # The device still has this prompt when it is sent again.
        ask(server, prompts[-1:] * 2, COUNT, at_once=1)
        seed += 1
