"""Prompts that share no page with other tests' prompts, and the tokens that must follow them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, Self

from tests.sglang.stock.engines import PAGE, Answer, Server, wait_until

WHOLE = 12 * PAGE
"""How many of a prompt's tokens are in whole pages."""
STATE = "kvoffload_tier_state"
PATIENT: dict[str, Any] = {
    "module_path": "sglang_cpu_ops.patient",
    "class_name": "PatientStorage",
    "prefetch_timeout_base": 60,  # SGLang's own limit
    "remote_timeout_s": 60,
}
"""Settings with which every page is found that a tier has, however slow the machine is."""
_numbers = count()


def prompts(number: int) -> list[list[int]]:
    """Return new prompts. Six prompts do not fit in the device's cache, and twelve do not fit in host memory."""
    firsts = [next(_numbers) for _ in range(number)]
    rest = range(WHOLE + 3)
    return [[one % 256, one // 256, *((7 * place + 13 * one) % 256 for place in rest)] for one in firsts]


@dataclass(frozen=True)
class Prompts:
    wanted: Sequence[Sequence[int]]
    right: Sequence[tuple[int, ...]]

    @classmethod
    def answered_by(cls, server: Server, number: int = 6) -> Self:
        """Return new prompts and the server's tokens for them without storage. Then empty the server's caches."""
        wanted = prompts(number)
        right = [server.generate(prompt).tokens for prompt in wanted]
        server.flush()
        return cls(wanted, right)

    def ask(self, server: Server) -> list[int]:
        """Send the prompts and check the tokens. Return how many tokens of each prompt came from storage."""
        return [answer.stored for answer in self.answers(server)]

    def answers(self, server: Server) -> list[Answer]:
        """Send the prompts and check the tokens. Return the server's answers."""
        answers = [server.generate(prompt) for prompt in self.wanted]
        assert [answer.tokens for answer in answers] == self.right, answers
        return answers

    @property
    def all(self) -> list[int]:
        """The result of `ask` if all whole pages come from storage."""
        return [WHOLE] * len(self.wanted)

    @property
    def none(self) -> list[int]:
        """The result of `ask` if no page comes from storage."""
        return [0] * len(self.wanted)


@contextmanager
def attached(
    server: Server, policy: str = "timeout", *, opens: bool = True, **settings: object
) -> Iterator[None]:
    """Attach our backend during the `with` block, and empty the caches of device and host before and after it.

    Args:
        server: the SGLang server.
        policy: SGLang's policy for how long a request waits for storage.
        opens: whether the tiers can open. If so, wait until they are open.
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
        wait_until(lambda: server.detach()[0] == 200)  # SGLang refuses to detach a backend while a copy runs
        server.flush()
