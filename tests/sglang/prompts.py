"""Prompts that share no page with those of other tests, and what an engine should make of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Self

from tests.sglang.stock.engines import PAGE, Answer, Server, wait_until

WHOLE = 12 * PAGE
"""Tokens of a prompt in whole pages."""
STATE = "kvoffload_tier_state"
_numbers = count()


def prompts(number: int) -> list[list[int]]:
    """New prompts. Six are longer together than the device's cache, and twelve than the host's below it."""
    firsts = [next(_numbers) for _ in range(number)]
    return [
        [first % 256, first // 256, *((7 * place + 13 * first) % 256 for place in range(WHOLE + 3))]
        for first in firsts
    ]


@dataclass(frozen=True)
class Prompts:
    """Some prompts, and the tokens that follow each."""

    wanted: Sequence[Sequence[int]]
    right: Sequence[tuple[int, ...]]

    @classmethod
    def told_by(cls, server: Server, number: int = 6) -> Self:
        """New prompts, asked of a server without storage, whose cache is empty afterwards."""
        wanted = prompts(number)
        right = [server.generate(prompt).tokens for prompt in wanted]
        server.flush()
        return cls(wanted, right)

    def ask(self, server: Server) -> list[int]:
        """How many tokens of each prompt came from storage; the answers must be right."""
        return [answer.stored for answer in self.answers(server)]

    def answers(self, server: Server) -> list[Answer]:
        """The answers, which must be right."""
        answers = [server.generate(prompt) for prompt in self.wanted]
        assert [answer.tokens for answer in answers] == self.right
        return answers

    @property
    def all(self) -> list[int]:
        """What `ask` returns if everything comes from storage."""
        return [WHOLE] * len(self.wanted)

    @property
    def none(self) -> list[int]:
        """What `ask` returns if nothing does."""
        return [0] * len(self.wanted)


@contextmanager
def attached(
    server: Server, policy: str = "timeout", *, opens: bool = True, **settings: object
) -> Iterator[None]:
    """Our backend, for the block. It begins and ends with empty caches above it.

    Args:
        server: the server.
        policy: how long a request waits for storage.
        opens: whether its tiers are there; then the block begins when they are open.
        settings: the backend's settings.
    """
    server.flush()
    status, words = server.attach(policy, **settings)
    assert status == 200, words
    try:
        if opens:
            tiers = [name for name in ("disk", "remote") if {f"{name}_path", f"{name}_url"} & settings.keys()]
            wait_until(lambda: all(server.metric(STATE, tier=tier, state="open") == 1 for tier in tiers))
        yield
    finally:
        wait_until(lambda: server.detach()[0] == 200)  # SGLang refuses while a copy is on its way
        server.flush()
