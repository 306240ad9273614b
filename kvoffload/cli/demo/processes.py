"""Engines of a demo in processes of their own, from the demo's side; `engine_process` is the other."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kvoffload.cli.demo.compare import compare
from kvoffload.cli.demo.conversations import Conversation, TurnId
from kvoffload.cli.demo.engine_process import Failed, Played, Ready, Round, Served, serve
from kvoffload.cli.demo.options import DemoOptions
from kvoffload.cli.demo.play import Play, Turn
from kvoffload.cli.demo.results import SCHEMA, Agreement, Quantiles, to_json
from kvoffload.cli.demo.summary import quantiles
from kvoffload.cli.demo.table import milliseconds
from kvoffload.cli.exits import CommandError, Exit

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

    from kvoffload.cli.demo.screen import Screen

_END_S = 10.0
_LABEL, _VALUE = 35, 15  # widths, at least


@dataclass(frozen=True, slots=True)
class Variant:
    """One engine's turns of conversations that another engine, or its own earlier life, had begun.

    Args:
        first_ttft_s: of each conversation's first turn on it.
        later_ttft_s: of the turns after those; None without any.
        computed_tokens: tokens that ran through the model.
        device_tokens, host_tokens: prompt tokens reused from device and host.
    """

    first_ttft_s: Quantiles
    later_ttft_s: Quantiles | None
    computed_tokens: int
    device_tokens: int
    host_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuedResult:
    """The result of a demo whose conversations continue on other engines, or after a restart.

    Args:
        variants: by the engine's name; the first one has no offloading.
        agreements: outputs compared with those of the first one, by the names of the others.
        broken_laws: as text.
    """

    kind: ClassVar[str]
    variants: Mapping[str, Variant]
    agreements: Mapping[str, Agreement]
    broken_laws: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether outputs agree and no law is broken."""
        return not self.broken_laws and all(each.holds for each in self.agreements.values())

    def verdict(self, what: str, other: str) -> str:
        """Return the report's first line: how much sooner `what` came on an engine, and whether outputs agree."""
        plain, offloaded = (
            self.variants[name].first_ttft_s.p50 for name in (next(iter(self.variants)), other)
        )
        outcome = "Outputs are identical." if self.passed else "Outputs DIFFER, or laws are BROKEN."
        times = f"{1e3 * plain:,.0f} -> {1e3 * offloaded:,.0f} ms ({plain / offloaded:.1f}x)"
        return f"{what}: {times}. {outcome}"

    def problems(self) -> list[str]:
        """Return a line for each law that is broken, and for each engine whose outputs differ."""
        lines = [f"audit       {problem}" for problem in self.broken_laws]
        lines += [
            f"outputs     {name}: {each.mismatches} of {each.tokens:,} tokens differ"
            for name, each in self.agreements.items()
            if not each.holds
        ]
        return lines

    def show(self, lines: Sequence[str], screen: Screen, *, as_json: bool) -> int:
        """Print these lines, or one JSON object: the fields, `schema`, `kind` and `passed`; return the exit code."""
        plain = {"schema": SCHEMA, "kind": self.kind, "passed": self.passed, **asdict(self)}
        screen.result(to_json(plain) if as_json else "\n".join(lines))
        return Exit.OK if self.passed else Exit.FAILED


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
        """Let the engine play a round."""
        self._pipe.send(asked)
        while not isinstance(found := await self._next(), Played):
            self.counted = found
        self.counted = found.counted
        return found

    async def play_and_kill(self, asked: Round, turns: int) -> None:
        """Start a round, and kill the process after `turns` turns of it."""
        self._pipe.send(asked)
        for _ in range(turns):
            self.counted = await self._next()
        self.kill()

    def kill(self) -> None:
        """End it as a crash would."""
        self._process.kill()
        self._process.join()

    async def end(self) -> None:
        """Let the process end in order."""
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
    """Run an engine for each of the settings; none of them outlives the context."""
    engines: dict[str, EngineProcess] = {}
    try:
        for name, offload in settings.items():
            engines[name] = _start(options, conversations, offload)
        yield engines, {name: await engine.ready() for name, engine in engines.items()}
    finally:
        for engine in engines.values():
            engine.kill()


async def play_rounds(
    engines: Mapping[str, EngineProcess],
    numbers: range,
    script: dict[TurnId, tuple[int, ...]],
    say: Callable[[str], None],
) -> tuple[dict[str, list[Turn]], list[str]]:
    """Let the engines play rounds in turns; all prompts have the first engine's answers.

    Returns:
        Each engine's turns, and the laws that are broken.
    """
    turns: dict[str, list[Turn]] = {name: [] for name in engines}
    problems: list[str] = []
    for number in numbers:
        say(f"turn {number + 1} of {numbers.stop}")
        played = {name: await engine.play(Round(number, script)) for name, engine in engines.items()}
        first = next(iter(played.values()))
        script.update({turn.turn: tuple(token.token_id for token in turn.answer) for turn in first.turns})
        for name, one in played.items():
            turns[name] += one.turns
            problems += [f"{name}: {problem}" for problem in one.problems]
    return turns, problems


def compared(
    first: int, turns: Mapping[str, Sequence[Turn]]
) -> tuple[dict[str, Variant], dict[str, Agreement]]:
    """Return each engine's numbers, and how the others' outputs compare with those of the first engine.

    Args:
        first: number of the first turns.
        turns: by the engine's name.
    """
    plays = {name: Play(tuple(played), 0.0) for name, played in turns.items()}
    plain, *others = plays
    return (
        {name: _variant(first, played) for name, played in turns.items()},
        {name: compare(plays[plain], plays[name]) for name in others},
    )


def _variant(first: int, turns: Sequence[Turn]) -> Variant:
    later = [turn.ttft_s for turn in turns if turn.turn.turn > first]
    return Variant(
        first_ttft_s=quantiles([turn.ttft_s for turn in turns if turn.turn.turn == first]),
        later_ttft_s=quantiles(later) if later else None,
        computed_tokens=sum(turn.stats.computed_tokens for turn in turns),
        device_tokens=sum(turn.stats.device_hit_tokens for turn in turns),
        host_tokens=sum(turn.stats.external_tokens for turn in turns),
    )


def table(
    heads: Sequence[str], variants: Collection[Variant], first: str, more: Mapping[str, Sequence[int]]
) -> list[str]:
    """Return variants side by side.

    Args:
        heads: names of them.
        variants: of the engines.
        first: names the first turn.
        more: further rows: a number for each variant.
    """
    later = [milliseconds(each.later_ttft_s) for each in variants if each.later_ttft_s]
    numbers = {
        "tokens computed": [each.computed_tokens for each in variants],
        "prompt tokens found on the device": [each.device_tokens for each in variants],
        "prompt tokens found on the host": [each.host_tokens for each in variants],
        **more,
    }
    rows = {
        f"first token, {first}, p50/p99": [milliseconds(each.first_ttft_s) for each in variants],
        **({"first token, later turns, p50/p99": later} if later else {}),
        **{label: [f"{number:,}" for number in row] for label, row in numbers.items()},
    }
    width = max(_VALUE, *(len(value) + 1 for row in (heads, *rows.values()) for value in row))
    lines = [
        f"{label:<{_LABEL}}" + "".join(f"{value:>{width}}" for value in row)
        for label, row in {"": heads, **rows}.items()
    ]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]


def _start(
    options: DemoOptions, conversations: Sequence[Conversation], offload: Mapping[str, object] | None
) -> EngineProcess:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, options, conversations, offload), daemon=True)
    process.start()
    theirs.close()  # or its end would not be noticed
    return EngineProcess(process, ours)
