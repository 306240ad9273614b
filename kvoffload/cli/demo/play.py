"""Plays conversations turn by turn on one engine, and records each turn's answer and statistics.

A turn's prompt consists of all earlier messages and answers and a new message. Each byte is a token.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvoffload.cli.demo.options import DemoOptions
from kvoffload.engine import SamplingParams

if TYPE_CHECKING:
    from kvoffload.engine import Engine, RequestStats, Token

_IDLE_POLL_S = 0.001
_WARM_UP_ANSWER = 4

Conversation = tuple[bytes, ...]
"""The user's messages in one conversation, without the answers."""


class TurnId(NamedTuple):
    """The numbers of a conversation and of one of its turns, both from 0."""

    conversation: int
    turn: int


Answers = Mapping[TurnId, Sequence[int]]


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn that an engine has answered.

    Args:
        turn: the numbers of the conversation and of the turn.
        answer: the generated tokens.
        stats: the engine's statistics about the turn's request.
    """

    turn: TurnId
    answer: tuple[Token, ...]
    stats: RequestStats

    @property
    def ttft_s(self) -> float:
        """Seconds from the request's arrival to its first token."""
        assert self.stats.first_token_s is not None, "it was served to its end"
        return self.stats.first_token_s - self.stats.arrived_s


def make_conversations(options: DemoOptions) -> list[Conversation]:
    """Return conversations of random messages, drawn with `options.seed`. No two conversations share a prefix."""
    draw = random.Random(options.seed)
    later = [options.turn_tokens] * (options.turns - 1)
    return [
        tuple(draw.randbytes(size) for size in (options.first_tokens, *later))
        for _ in range(options.conversations)
    ]


def prompt_of(conversation: Conversation, answers: Sequence[Sequence[int]]) -> list[int]:
    """Return the prompt of a conversation's next turn after the given answers."""
    prompt: list[int] = []
    for message, answer in zip(conversation, answers, strict=False):
        prompt += [*message, *answer]
    return [*prompt, *conversation[len(answers)]]


class Player:
    """Plays conversations on one engine, round by round: in each round, every conversation takes one turn.

    Args:
        engine: a running engine.
        conversations: the conversations, all with the same number of turns.
        options: determines the length of the answers, and the number of turns served at the same time.
        on_turn: called after each turn.
        script: the answers to put into prompts, so that two players send the same prompts; by default the engine's.
    """

    def __init__(
        self,
        engine: Engine,
        conversations: Sequence[Conversation],
        options: DemoOptions,
        on_turn: Callable[[Turn], object],
        script: Answers | None = None,
    ) -> None:
        self.answers: dict[TurnId, Sequence[int]] = {}
        """The generated tokens of each turn."""
        self.turns: list[Turn] = []
        """The turns played so far, in order."""
        self.elapsed_s = 0.0
        """The total time of all rounds, in seconds."""
        self._engine = engine
        self._conversations = conversations
        self._params = SamplingParams(options.answer_tokens)
        self._concurrency = options.concurrency
        self._on_turn = on_turn
        self._script = self.answers if script is None else script

    async def play_round(self, number: int) -> None:
        """Play turn `number` of every conversation, and wait until the engine is idle."""
        clock = asyncio.get_running_loop().time
        begun = clock()
        turns = iter([TurnId(one, number) for one in range(len(self._conversations))])
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._concurrency):
                    group.create_task(self._serve(turns))
        except ExceptionGroup as failed:
            # Raise only one error: when the engine stops, all requests fail for the same reason.
            raise failed.exceptions[0] from None
        await idle(self._engine)
        self.elapsed_s += clock() - begun
        self.turns.sort(key=lambda one: (one.turn.turn, one.turn.conversation))

    async def _serve(self, turns: Iterator[TurnId]) -> None:
        for turn in turns:
            served = await self._take(turn)
            self.turns.append(served)
            self.answers[turn] = tuple(token.token_id for token in served.answer)
            self._on_turn(served)

    async def _take(self, turn: TurnId) -> Turn:
        said = [self._script[TurnId(turn.conversation, before)] for before in range(turn.turn)]
        prompt = prompt_of(self._conversations[turn.conversation], said)
        async with self._engine.submit(prompt, self._params) as stream:
            answer = tuple([token async for token in stream])
        return Turn(turn, answer, stream.stats)


async def idle(engine: Engine) -> None:
    """Wait until the engine and its plugin are idle."""
    while engine.has_work:  # noqa: ASYNC110  # the engine has no event for it
        await asyncio.sleep(_IDLE_POLL_S)


async def warm_up(engine: Engine, tokens: int, seed: int) -> None:
    """Serve a prompt that no conversation contains, because an engine's first request takes extra time."""
    prompt = random.Random(seed).choices(range(engine.config.model.vocab_size), k=tokens)
    async with engine.submit(prompt, SamplingParams(_WARM_UP_ANSWER)) as stream:
        async for _ in stream:
            pass
    await idle(engine)
