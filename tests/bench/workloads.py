"""Workloads that are drawn at random, for replays: chats, agents, and documents among prompts that never return."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, islice

from kvoffload.model.ids import BlockKey
from tests.bench.trace_file import GROUP, Prompt, Trace
from tests.keys import block_key

_BLOCK_TOKENS = 512
_Keys = tuple[BlockKey, ...]


class _Draw:
    """Draws numbers, and makes keys of blocks that no prompt had before."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._fresh = (block_key(b"%032x" % number, GROUP) for number in count())

    def keys(self, least: int, most: int | None = None) -> _Keys:
        return tuple(islice(self._fresh, self.random.randint(least, most or least)))


def _chats(draw: _Draw) -> Iterator[_Keys]:
    """Yield the turns of 150 conversations, some of them busier. A prompt has all turns before it."""
    system = draw.keys(4)
    chats = [system] * 150
    while True:
        chat = min(int(draw.random.expovariate(4 / len(chats))), len(chats) - 1)
        before = chats[chat] if len(chats[chat]) <= 100 else system
        chats[chat] = before + draw.keys(2, 8)
        yield chats[chat]


def _agents(draw: _Draw) -> Iterator[_Keys]:
    """Yield the steps of 40 tasks at a time. A task has up to 30 steps and does not return afterwards."""
    system = draw.keys(12)
    tasks: list[tuple[_Keys, int]] = []
    while True:
        while len(tasks) < 40:
            tasks.append((system + draw.keys(4), draw.random.randint(3, 30)))
        place = draw.random.randrange(len(tasks))
        prompt, steps = tasks.pop(place)
        prompt += draw.keys(1, 4)
        if steps > 1:
            tasks.insert(place, (prompt, steps - 1))
        yield prompt


def _documents(draw: _Draw) -> Iterator[_Keys]:
    """Yield questions about 60 documents, some of them asked more often, and 70 % prompts that never return."""
    documents = [draw.keys(30) for _ in range(60)]
    weights = [1 / (place + 1) ** 0.7 for place in range(len(documents))]
    while True:
        if draw.random.random() < 0.7:
            yield draw.keys(30)
        else:
            yield draw.random.choices(documents, weights)[0] + draw.keys(1)


_KINDS: Mapping[str, Callable[[_Draw], Iterator[_Keys]]] = {
    "chats": _chats,
    "agents": _agents,
    "documents": _documents,
}
WORKLOADS = tuple(_KINDS)
"""The names of the workloads."""


def draw_workload(name: str, requests: int, seed: int = 1) -> Trace:
    """Return the first requests of a workload, one a second."""
    keys = islice(_KINDS[name](_Draw(seed)), requests)
    return Trace(
        _BLOCK_TOKENS, [Prompt(at, len(each) * _BLOCK_TOKENS + 1, each) for at, each in enumerate(keys)]
    )


def live_blocks(prompts: Sequence[Prompt]) -> float:
    """Return how many blocks have been used and will be used again, on average over the requests."""
    first: dict[BlockKey, int] = {}
    last: dict[BlockKey, int] = {}
    for number, prompt in enumerate(prompts):
        for key in prompt.keys:
            first.setdefault(key, number)
            last[key] = number
    return sum([last[key] - first[key] for key in first]) / len(prompts)
