from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from itertools import cycle

import pytest

from kvoffload.engine import Engine, SamplingParams, Token, TokenStream
from kvoffload.engine.plugin import EnginePlugin, load_plugin
from kvoffload_reference.plugin import ReferencePlugin
from tests.conservation import conservation
from tests.core.audit import audit_side
from tests.engine.tiny import assert_idle, assert_same
from tests.reference.rig import KINDS, PLENTY, TOLERANCE, Rig, config_of, plain, rig, slot_bytes, text

# with so few blocks, two long requests preempt each other
TIGHT = {"full": 10, "sliding_window": 22, "chunked_local": 20, "recurrent": 12}


class Talk:
    """Runs conversations with aborts, preemptions, resets and slow copies."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig = rig
        self.random = random.Random(seed)
        self.open: list[TokenStream] = []
        self.turns = 0
        self.preemptions = 0

    def hold_it(self, turns: int) -> None:
        while self.turns < turns or self.rig.engine.has_work:
            if self.turns < turns and len(self.open) < 4:
                self.say()
            self.disturb()
            self.rig.step()
            self.open = [stream for stream in self.open if stream.request_id in self.rig.engine._open]
        self.rig.release()
        self.rig.drain()

    def say(self) -> None:
        """Send the next prompt of a conversation. The previous prompt may still be open."""
        conversation, length = self.random.randrange(4), self.random.randrange(3, 26)
        self.open.append(self.rig.submit(text(conversation, length), self.random.randrange(1, 6)))
        self.turns += 1

    def disturb(self) -> None:
        chances = {"": 53, "abort": 4, "preempt": 15, "reset": 1, "hold": 8, "release": 19}
        (what,) = self.random.choices([*chances], [*chances.values()])
        if what in ("abort", "preempt") and self.open:
            stream = self.random.choice(self.open)
            getattr(self.rig.engine, what)(stream.request_id)
        elif what == "reset":
            self.rig.engine.reset_prefix_cache()
        elif what == "hold":
            self.rig.hold()
        elif what == "release":
            self.rig.release()


@pytest.mark.slow
@pytest.mark.parametrize("host_blocks", [1, 9, PLENTY])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("policy", ["eager", "lazy", "twice"])
@pytest.mark.parametrize("kind", KINDS)
def test_output_is_the_same_with_aborts_preemptions_and_resets(
    kind: str, policy: str, ranks: int, host_blocks: int
) -> None:
    blocks = TIGHT[kind] + 1
    with rig(
        kind, store_policy=policy, ranks=ranks, host_blocks=host_blocks, num_blocks=blocks, step_tokens=8
    ) as made:
        Talk(made, seed=host_blocks + ranks).hold_it(turns=30)
        made.assert_clean()
        made.assert_outputs()
        stats = [stream.stats for _, _, stream in made.streams]
        assert sum(each.preemptions for each in stats) > 0
        if host_blocks == PLENTY:
            assert sum(each.external_tokens for each in stats) > 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["eager", "lazy", "twice"])
@pytest.mark.parametrize("kind", KINDS)
def test_r6_the_longest_request_is_served_by_the_smallest_pool(kind: str, policy: str) -> None:
    tokens = 100
    with rig(kind, num_blocks=200) as big:
        need = big.engine._capacity.request_blocks(tokens + 3)
    with rig(kind, num_blocks=1 + need, store_policy=policy) as made:
        limit = made.offload.shape.lease_limit
        assert limit <= need // 4
        for turn in range(3):
            stream = made.submit(text(turn % 2, tokens), 4)
            made.hold()
            for _ in range(30):
                made.step()
                pool = made.engine.pool
                held = zip(pool._leased, pool._held, strict=True)
                assert sum(leases > 0 and not references for leases, references in held) <= limit
            made.release()
            made.drain()
            assert stream.stats.finished_s is not None
        made.assert_outputs()
        made.assert_clean()


@pytest.mark.parametrize("policy", ["eager", "lazy", "twice"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_metrics_agree_with_the_engines_own_statistics(kind: str, policy: str) -> None:
    with rig(kind, store_policy=policy, num_blocks=TIGHT[kind] * 2, step_tokens=8, ranks=2) as made:
        for turn in (8, 16, 24):
            for conversation in range(4):
                made.run(text(conversation, turn), 2)
        made.assert_clean()
        stats = [stream.stats for _, _, stream in made.streams]
        assert not any(each.preemptions for each in stats)
        for each in stats:
            known = each.prompt_tokens + each.generated_tokens - 1
            assert known == each.device_hit_tokens + each.external_tokens + each.computed_tokens
        external = sum(each.external_tokens for each in stats)
        assert external > 0
        assert made.count("lookup_tokens", "hit") == external
        missed = sum(each.prompt_tokens - each.device_hit_tokens - each.external_tokens for each in stats)
        assert made.count("lookup_tokens", "miss") == missed
        size = slot_bytes(kind, ranks=2) * 2
        loaded, stored = made.count("load_blocks", "loaded"), made.count("store_blocks", "stored")
        assert made.count("transfer_bytes", "host", "load") == loaded * size
        assert made.count("transfer_bytes", "host", "store") == stored * size
        assert made.counts().total("kvoffload_contract_violations_total") == 0


async def answer(engine: Engine, prompt: Sequence[int]) -> list[Token]:
    """Send a prompt; return the answer after the plugin's remaining work has ended."""
    tokens = [token async for token in engine.submit(prompt, SamplingParams(4))]
    while engine.has_work:  # noqa: ASYNC110  # the engine's own task sets no event for this
        await asyncio.sleep(0)
    return tokens


@pytest.mark.asyncio
@pytest.mark.parametrize("made", ["by entry point", "by its class"])
@pytest.mark.parametrize("kind", KINDS)
async def test_on_real_threads_blocks_are_found_and_no_token_changes(
    kind: str, made: str, caplog: pytest.LogCaptureFixture
) -> None:
    def hits() -> int:
        return offload.counters.snapshot().count("kvoffload_lookup_blocks_total", "hit")

    prompts, answers = [text(1, 24), text(2, 24), text(3, 24), text(1, 24)], list[list[Token]]()
    plugin: EnginePlugin = ReferencePlugin() if made == "by its class" else load_plugin("kvoffload")
    async with Engine(config_of(kind, num_blocks=TIGHT[kind] + 1, step_tokens=8), plugin) as engine:
        offload = engine._plugin._offload  # type: ignore[attr-defined]  # it is ours
        while offload.core.state.pool.capacity == 0:  # a background thread prepares the host memory
            await answer(engine, text(9, 3))
        # On a busy machine, copies are slower than steps. The state that a hit needs may then get no block,
        # so the prompts are served again.
        while not hits() and len(answers) < 10 * len(prompts):
            answers += [await answer(engine, prompt) for prompt in prompts]
        assert hits()
        assert_idle(engine)
        assert audit_side(offload) == []
        assert conservation(offload.counters.snapshot(), drained=True) == []
    for prompt, found in zip(cycle(prompts), answers, strict=False):
        assert_same(found, plain(kind, prompt, 4), TOLERANCE)
    assert [one.getMessage() for one in caplog.records if one.levelname in ("ERROR", "WARNING")] == []
