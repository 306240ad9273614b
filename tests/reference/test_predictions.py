from __future__ import annotations

import random

import pytest

from tests.engine.tiny import taken
from tests.reference.rig import BLOCK, Rig, rig, text

SYSTEM = text(0, 2 * BLOCK)


def chat(made: Rig, conversations: int, requests: int) -> None:
    """Serve conversations that return in a random order. A prompt is the last one, its answer and four tokens."""
    draw = random.Random(5)
    chats: list[list[int]] = [[] for _ in range(conversations)]
    for _ in range(requests):
        current = chats[min(int(draw.expovariate(4 / conversations)), conversations - 1)]
        if not current or len(current) > 100:
            current[:] = [*SYSTEM, *draw.choices(range(64), k=3 * BLOCK)]
        stream = made.submit(current, 5)
        made.drain()
        current += [token.token_id for token in taken(stream)] + draw.choices(range(64), k=BLOCK)


def found(made: Rig) -> float:
    """Return the share of prompt tokens that the device and the host had."""
    tokens = {source: made.count("prompt_tokens", source) for source in ("device", "host", "computed")}
    return 1 - tokens["computed"] / sum(tokens.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "host", "device"), [("eager", 60, 40), ("eager", 30, 40), ("lazy", 80, 40)]
)
def test_the_prediction_for_todays_size_is_what_the_engine_finds(policy: str, host: int, device: int) -> None:
    with rig(host_blocks=host, num_blocks=device, store_policy=policy) as made:
        chat(made, 12, 80)
        made.pass_time(1.1)
        predicted = made.offload.gauges()["kvoffload_predicted_hit_tokens_ratio"]
        assert 0.3 < found(made) < 0.95
        assert predicted["host", "1x"] == pytest.approx(found(made), abs=0.05)
        assert predicted["host", "8x"] > predicted["host", "1x"] + 0.01
