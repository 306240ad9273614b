"""Plays conversations on one engine, several at a time, and notes what each turn got and cost."""

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
    """One turn that was served.

    Args:
        turn: which.
        prompt: its tokens.
        answer: what was generated.
        stats: what it cost, by the engine's own account.
    """

    turn: TurnId
    prompt: tuple[int, ...]
    answer: tuple[Token, ...]
    stats: RequestStats

    @property
    def ttft_s(self) -> float:
        """Seconds from its arrival to its first token."""
        assert self.stats.first_token_s is not None, "it was served to its end"
        return self.stats.first_token_s - self.stats.arrived_s


@dataclass(frozen=True, slots=True)
class Play:
    """All turns, in the order in which they were taken, and the seconds that the engine had something to do."""

    turns: tuple[Turn, ...]
    elapsed_s: float


class Player:
    """Plays conversations on one engine, round by round: in each, every conversation takes one turn.

    Args:
        engine: entered already.
        conversations: who says what; all have equally many turns.
        options: how much is generated, and how many turns are served at a time.
        told: called after each turn.
        script: answers that prompts contain instead of the engine's own, so that two plays have the same prompts,
            whatever the engines answer.
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
        """What was generated so far, by turn."""
        self._engine = engine
        self._conversations = conversations
        self._params = SamplingParams(options.answer_tokens)
        self._concurrency = options.concurrency
        self._on_turn = on_turn
        self._script = self.answers if script is None else script
        self._turns: dict[TurnId, Turn] = {}
        self._elapsed_s = 0.0

    async def play_round(self, number: int) -> None:
        """Play every conversation's turn of this number, and wait until the engine has nothing left to do."""
        clock = asyncio.get_running_loop().time
        begun = clock()
        turns = iter([TurnId(one, number) for one in range(len(self._conversations))])
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._concurrency):
                    group.create_task(self._serve(turns))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None  # what stops an engine stops all its requests alike
        await idle(self._engine)
        self._elapsed_s += clock() - begun

    def result(self) -> Play:
        """What was played so far."""
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
    """Wait until the engine and its plugin have nothing left to do."""
    while engine.has_work:  # noqa: ASYNC110  # the engine has no event for it
        await asyncio.sleep(_IDLE_POLL_S)


async def warm_up(engine: Engine, tokens: int, seed: int) -> None:
    """Serve a prompt that has nothing to do with what follows: first uses of memory and kernels cost time."""
    prompt = random.Random(seed).choices(range(engine.config.model.vocab_size), k=tokens)
    async with engine.submit(prompt, SamplingParams(_WARM_UP_ANSWER)) as stream:
        async for _ in stream:
            pass
    await idle(engine)
