"""A seeded trace like those of chat services: conversations that return, a hot system prompt, and single prompts."""

from __future__ import annotations

import random
from collections.abc import Iterator

from kvoffload.model.ids import BlockKey, GroupId
from tests.keys import block_key

TOKENS = 16


def chats(seed: int, requests: int, *, at_once: int = 400) -> Iterator[tuple[BlockKey, ...]]:
    """Yield the block keys of each prompt. Every prompt begins with the same block; a turn adds four to its conversation."""
    draw = random.Random(seed)
    first = [_key(draw)]
    open_chats: list[list[BlockKey]] = []
    for _ in range(requests):
        if len(open_chats) < at_once or draw.random() < 0.35:
            open_chats.append([*first, *(_key(draw) for _ in range(draw.randrange(2, 24)))])
            del open_chats[:-at_once]
            chat = open_chats[-1]
        else:  # recent conversations return more often
            chat = open_chats[-1 - min(int(draw.expovariate(4 / at_once)), at_once - 1)]
            chat += [_key(draw) for _ in range(4)]
        yield tuple(chat)


def _key(draw: random.Random) -> BlockKey:
    return block_key(draw.randbytes(32), GroupId(0))
