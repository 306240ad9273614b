from __future__ import annotations

import os
import random
import threading
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from tests.sglang.prompts import PATIENT, STATE, Prompts
from tests.sglang.stock.engines import PAGE, Server, serving, wait_until
from tests.vllm.stock.checkpoints import make

pytestmark = [pytest.mark.sglang, pytest.mark.full, pytest.mark.timeout(3600)]

KILLS = int(os.environ.get("KVOFFLOAD_SGLANG_KILLS", "20"))
SEED = 7
DISK = "1728KiB"
"""The disk has room for three quarters of the prompts, so that pages are written until the kill."""


def test_servers_killed_at_random_serve_correct_tokens_from_earlier_servers_pages(
    server: Server, some: Prompts, model: Path, tmp_path: Path
) -> None:
    others = Prompts.answered_by(server)
    prompts = dict(enumerate(zip([*some.wanted, *others.wanted], [*some.right, *others.right], strict=True)))
    asked = [*prompts]

    def ask(living: Server, number: int) -> int:
        asked.append(number)
        prompt, right = prompts[number]
        answer = living.generate(prompt)
        assert answer.tokens == right
        return answer.stored

    chance = random.Random(SEED)
    storage = {"disk_path": str(tmp_path / "disk"), "disk_bytes": DISK}
    for life in range(KILLS):
        with serving(model, tmp_path / "log", storage=storage) as living:
            wait_until(lambda: living.metric(STATE, tier="disk", state="open") == 1)
            # The last prompt comes first. In any other order, each new page could evict the page that is needed next.
            found = [ask(living, number) for number in dict.fromkeys(reversed(asked))]
            assert life == 0 or sum(found) > 0
            killer = threading.Timer(chance.uniform(0.1, 4.0), living.kill)
            killer.start()
            with suppress(OSError, HTTPException):  # errors from the killed server
                while True:
                    for number in prompts:
                        ask(living, number)
            killer.join()
    other = make("qwen3", tmp_path / "other", seed=1)
    with serving(other, tmp_path / "log", storage=storage) as living:
        wait_until(lambda: living.metric(STATE, tier="disk", state="open") == 1)
        assert sum(living.generate(prompt).stored for prompt in some.wanted) == 0


def test_each_of_two_ranks_stores_its_half(
    server: Server, some: Prompts, model: Path, tmp_path: Path
) -> None:
    settings = {**PATIENT, "disk_path": str(tmp_path / "disk")}
    options: dict[str, Any] = {"tp_size": 2, "hicache_mem_layout": "page_first_direct"}
    environment = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with serving(model, tmp_path / "log", storage=settings, environment=environment, **options) as two:
        wait_until(lambda: two.metric(STATE, tier="disk", state="open") == 2)
        some.ask(two)
        two.flush()
        assert some.ask(two) == some.all

        def written(rank: str) -> float:
            return two.metric("kvoffload_tier_blocks_total", rank=rank, direction="store", outcome="done")

        # Each rank exports its counts once a second.
        wait_until(lambda: [written(rank) * PAGE for rank in "01"] == [sum(some.all)] * 2)
    assert len(list((tmp_path / "disk").glob("*/identity.json"))) == 2
