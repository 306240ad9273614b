"""Plays conversations on one engine, several at a time, and records the answer and cost of each turn."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvoffload.cli.demo.conversations import Answers, Conversation, TurnId
from kvoffload.cli.demo.options import DemoOptions
from kvoffload.engine import SamplingParams

if TYPE_CHECKING:
    from kvoffload.engine import Engine, RequestStats, Token

_IDLE_POLL_S = 0.001
_WARM_UP_ANSWER = 4


@dataclass(frozen=True, slots=True)
class Turn:
    """One served turn.

    Args:
        turn: its number and conversation.
        prompt: its tokens.
        answer: the generated tokens.
        stats: what it cost, as the engine counts.
    """

    turn: TurnId
    prompt: tuple[int, ...]
    answer: tuple[Token, ...]
    stats: RequestStats

    @property
    def ttft_s(self) -> float:
        """Return the seconds from its arrival to its first token."""
        assert self.stats.first_token_s is not None, "it was served to its end"
        return self.stats.first_token_s - self.stats.arrived_s


@dataclass(frozen=True, slots=True)
class Play:
    """All turns in order, and the seconds in which the engine was busy."""

    turns: tuple[Turn, ...]
    elapsed_s: float


class Player:
    """Plays conversations on one engine, round by round: in each, every conversation takes one turn.

    Args:
        engine: running.
        conversations: all of them have the same number of turns.
        options: the length of answers, and the number of turns served at a time.
        on_turn: called after each turn.
        script: answers to use in prompts instead of the engine's own, so that two plays have the same prompts.
    """

    def __init__(
        self,
        engine: Engine,
        conversations: Sequence[Conversation],
        options: DemoOptions,
        on_turn: Callable[[], object],
        script: Answers | None = None,
    ) -> None:
        self.answers: dict[TurnId, tuple[int, ...]] = {}
        """The generated tokens by turn."""
        self._engine = engine
        self._conversations = conversations
        self._params = SamplingParams(options.answer_tokens)
        self._concurrency = options.concurrency
        self._on_turn = on_turn
        self._script = self.answers if script is None else script
        self._turns: dict[TurnId, Turn] = {}
        self._elapsed_s = 0.0

    async def play_round(self, number: int) -> None:
        """Play the turn of this number of every conversation, and wait until the engine is idle."""
        clock = asyncio.get_running_loop().time
        begun = clock()
        turns = iter([TurnId(one, number) for one in range(len(self._conversations))])
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._concurrency):
                    group.create_task(self._serve(turns))
        except ExceptionGroup as failed:
            raise failed.exceptions[
                0
            ] from None  # an engine that stops ends all its requests with the same error
        await idle(self._engine)
        self._elapsed_s += clock() - begun

    def result(self) -> Play:
        """Return the turns played so far."""
        turns = sorted(self._turns, key=lambda turn: (turn.turn, turn.conversation))
        return Play(tuple(self._turns[turn] for turn in turns), self._elapsed_s)

    async def _serve(self, turns: Iterator[TurnId]) -> None:
        for turn in turns:
            self._turns[turn] = served = await self._take(turn)
            self.answers[turn] = tuple(token.token_id for token in served.answer)
            self._on_turn()

    async def _take(self, turn: TurnId) -> Turn:
        said = [self._script[TurnId(turn.conversation, before)] for before in range(turn.turn)]
        prompt = self._conversations[turn.conversation].prompt(said)
        async with self._engine.submit(prompt, self._params) as stream:
            answer = tuple([token async for token in stream])
        return Turn(turn, tuple(prompt), answer, stream.stats)


async def idle(engine: Engine) -> None:
    """Wait until the engine and its plugin are idle."""
    while engine.has_work:  # noqa: ASYNC110  # the engine has no event for it
        await asyncio.sleep(_IDLE_POLL_S)


async def warm_up(engine: Engine, tokens: int, seed: int) -> None:
    """Serve an unrelated prompt, because the first use of memory and kernels takes extra time."""
    prompt = random.Random(seed).choices(range(engine.config.model.vocab_size), k=tokens)
    async with engine.submit(prompt, SamplingParams(_WARM_UP_ANSWER)) as stream:
        async for _ in stream:
            pass
    await idle(engine)
