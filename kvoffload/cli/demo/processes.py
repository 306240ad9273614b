"""Engines of a demo in processes of their own, from the demo's side; `engine_process` is the other."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvoffload.cli.demo.conversations import Conversation, TurnId
from kvoffload.cli.demo.engine_process import Failed, Played, Ready, Round, Served, serve
from kvoffload.cli.demo.options import DemoOptions
from kvoffload.cli.demo.play import Turn
from kvoffload.cli.demo.results import Agreement, Quantiles
from kvoffload.cli.demo.summary import quantiles
from kvoffload.cli.demo.table import milliseconds
from kvoffload.cli.exits import CommandError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

_END_S = 10.0
_LABEL, _NUMBER = 35, 15


@dataclass(frozen=True, slots=True)
class Variant:
    """The turns that one engine continued conversations with, which another engine or an earlier life had begun.

    Args:
        first_ttft_s: of each conversation's first turn on it.
        later_ttft_s: of the turns after those; None without any.
        computed_tokens: that ran through the model.
        device_tokens, host_tokens: of prompts, that did not need to.
    """

    first_ttft_s: Quantiles
    later_ttft_s: Quantiles | None
    computed_tokens: int
    device_tokens: int
    host_tokens: int


class EngineProcess:
    """One engine's process, and the demo's end of its pipe."""

    def __init__(self, process: SpawnProcess, pipe: Connection) -> None:
        self._process = process
        self._pipe = pipe
        self.counted = Served()

    async def ready(self) -> Ready:
        """Wait until it takes requests."""
        found = await self._next()
        assert isinstance(found, Ready), found
        return found

    async def play(self, asked: Round) -> Played:
        """Have a round played."""
        self._pipe.send(asked)
        while not isinstance(found := await self._next(), Played):
            self.counted = found
        self.counted = found.counted
        return found

    async def play_and_kill(self, asked: Round, turns: int) -> None:
        """Have a round begun, and kill the process after so many turns of it."""
        self._pipe.send(asked)
        for _ in range(turns):
            self.counted = await self._next()
        self.kill()

    def kill(self) -> None:
        """End it as a crash would."""
        self._process.kill()
        self._process.join()

    async def end(self) -> None:
        """Let it end by itself."""
        self._pipe.send(None)
        await asyncio.to_thread(self._process.join, _END_S)

    async def _next(self) -> Any:  # noqa: ANN401  # what a pipe brings
        try:
            found = await asyncio.to_thread(self._pipe.recv)
        except (EOFError, ConnectionResetError) as error:
            raise CommandError("an engine's process has ended by itself; its log is above") from error
        if isinstance(found, Failed):
            raise CommandError(found.reason)
        return found


@asynccontextmanager
async def started(
    options: DemoOptions,
    conversations: Sequence[Conversation],
    settings: Mapping[str, Mapping[str, object] | None],
) -> AsyncIterator[tuple[dict[str, EngineProcess], dict[str, Ready]]]:
    """Start an engine for each of the settings; whatever happens, none of them is left."""
    engines: dict[str, EngineProcess] = {}
    try:
        for name, offload in settings.items():
            engines[name] = _start(options, conversations, offload)
        yield engines, {name: await engine.ready() for name, engine in engines.items()}
    finally:
        for engine in engines.values():
            engine.kill()


async def play_round(
    engines: Mapping[str, EngineProcess], number: int, script: dict[TurnId, tuple[int, ...]]
) -> dict[str, Played]:
    """Have every engine play a round, one after the other; answers of the first go into all prompts."""
    played = {name: await engine.play(Round(number, script)) for name, engine in engines.items()}
    first = next(iter(played.values()))
    script.update({turn.turn: tuple(token.token_id for token in turn.answer) for turn in first.turns})
    return played


def variant_of(first: int, turns: Sequence[Turn]) -> Variant:
    """Return the numbers of turns; `first` is the number of the first ones."""
    later = [turn.ttft_s for turn in turns if turn.turn.turn > first]
    return Variant(
        first_ttft_s=quantiles([turn.ttft_s for turn in turns if turn.turn.turn == first]),
        later_ttft_s=quantiles(later) if later else None,
        computed_tokens=sum(turn.stats.computed_tokens for turn in turns),
        device_tokens=sum(turn.stats.device_hit_tokens for turn in turns),
        host_tokens=sum(turn.stats.external_tokens for turn in turns),
    )


def table(heads: Sequence[str], variants: Mapping[str, Variant], first: str) -> list[str]:
    """Return the variants side by side; `first` names the first turn."""
    shown = list(variants.values())
    later = [milliseconds(each.later_ttft_s) for each in shown if each.later_ttft_s]
    counts = {
        "tokens computed": "computed_tokens",
        "prompt tokens found on the device": "device_tokens",
        "prompt tokens found on the host": "host_tokens",
    }
    return [
        row("", *heads),
        "-" * (_LABEL + len(heads) * _NUMBER),
        row(f"first token, {first}, p50/p99", *(milliseconds(each.first_ttft_s) for each in shown)),
        *([row("first token, later turns, p50/p99", *later)] if later else []),
        *(row(label, *(f"{getattr(each, name):,}" for each in shown)) for label, name in counts.items()),
    ]


def row(label: str, *values: str) -> str:
    """Return a line of the table: a label, and a value for each engine."""
    return f"{label:<{_LABEL}}" + "".join(f"{value:>{_NUMBER}}" for value in values)


def outcome(*, passed: bool) -> str:
    """Return the end of the verdict."""
    return "Outputs are identical." if passed else "Outputs DIFFER, or laws are BROKEN."


def problems_of(laws: Sequence[str], agreements: Mapping[str, Agreement]) -> list[str]:
    """Return a line for each law that is broken, and for each engine whose outputs differ."""
    lines = [f"audit       {problem}" for problem in laws]
    lines += [
        f"outputs     {name}: {each.mismatches} of {each.tokens:,} tokens differ"
        for name, each in agreements.items()
        if not each.holds
    ]
    return lines


def _start(
    options: DemoOptions, conversations: Sequence[Conversation], offload: Mapping[str, object] | None
) -> EngineProcess:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, options, conversations, offload), daemon=True)
    process.start()
    theirs.close()  # or its end would not be noticed
    return EngineProcess(process, ours)
