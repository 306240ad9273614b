"""`demo --restart`: three engines play the same conversations, are killed half-way, and start again on what is left.

One has no offloading, one host memory alone, and one a disk below it. They take turns round by round, so that other load on the
machine affects all of them, and each is killed (SIGKILL) in the middle of the same round, which is then played again.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvoffload.cli.demo.compare import compare
from kvoffload.cli.demo.conversations import Conversation, TurnId, make_conversations
from kvoffload.cli.demo.documents import read_text
from kvoffload.cli.demo.options import DemoOptions
from kvoffload.cli.demo.play import Play, Turn
from kvoffload.cli.demo.restart_engine import Played, Ready, Round, Served, serve
from kvoffload.cli.demo.results import SCHEMA, Agreement, Quantiles, to_json
from kvoffload.cli.demo.summary import quantiles
from kvoffload.cli.demo.table import milliseconds
from kvoffload.cli.exits import CommandError, Exit
from kvoffload.cli.report.page import size_of

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

    from kvoffload.cli.demo.screen import Screen

_WITHOUT, _HOST, _DISK = "without", "host", "disk"
_DISK_SETTINGS = ("disk_path", "disk_bytes", "disk_bytes_per_rank", "spill_after_hits", "disk_identity")
_END_S = 10.0
LEAST_BEFORE = 2
"""Turns before the restart: what was not found again is not written to the disk."""
_LABEL, _NUMBER = 38, 14


@dataclass(frozen=True, slots=True)
class Variant:
    """One engine's second life.

    Args:
        first_ttft_s: of each conversation's first turn after the restart.
        later_ttft_s: of the turns after those; None without any.
        computed_tokens: that ran through the model since the restart.
        device_tokens, host_tokens: of prompts, that did not need to.
    """

    first_ttft_s: Quantiles
    later_ttft_s: Quantiles | None
    computed_tokens: int
    device_tokens: int
    host_tokens: int


@dataclass(frozen=True, slots=True)
class RestartResult:
    """The result of `demo --restart`.

    Args:
        killed_in_turn: number of the turn that was under way, from 1.
        variants: by name: without offloading, with host memory, with a disk below it.
        sooner: median time to first token after the restart, recomputed over with the disk.
        before: the last counts of the engine with the disk before it was killed.
        disk_blocks: blocks that the next process found on the disk.
        after: what that process counted.
        agreements: outputs since the restart compared with those without offloading.
        broken_laws: as text.
    """

    killed_in_turn: int
    variants: Mapping[str, Variant]
    sooner: float
    before: Served
    disk_blocks: int
    after: Served
    agreements: Mapping[str, Agreement]
    broken_laws: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether outputs agree and no law is broken."""
        return not self.broken_laws and all(each.holds for each in self.agreements.values())

    def to_json(self) -> str:
        """Return one object: the fields, `schema` and `passed`."""
        return to_json({"schema": SCHEMA, "kind": "restart", "passed": self.passed, **asdict(self)})


class _Process:
    """One engine's process, and the demo's end of its pipe."""

    def __init__(self, process: SpawnProcess, pipe: Connection) -> None:
        self._process = process
        self._pipe = pipe
        self.counted = Served()

    async def ready(self) -> int:
        """Wait until it takes requests; return the blocks that its disk has from before."""
        found = await self._next()
        assert isinstance(found, Ready), found
        return found.disk_blocks

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
            return await asyncio.to_thread(self._pipe.recv)
        except (EOFError, ConnectionResetError) as error:
            raise CommandError("an engine's process has ended by itself; its log is above") from error


async def run_restart(options: DemoOptions, screen: Screen) -> int:
    """Run it and return the exit code.

    Raises:
        CommandError: it cannot run as asked, or an engine's process failed.
    """
    result = await play_restart(options, screen)
    screen.result(result.to_json() if options.as_json else "\n".join(render(result)))
    return Exit.OK if result.passed else Exit.FAILED


async def play_restart(options: DemoOptions, screen: Screen) -> RestartResult:
    """Play before and after the restart.

    Raises:
        CommandError: an engine's process failed.
    """
    text = read_text(options.documents, options.conversations * options.message_tokens)
    conversations = make_conversations(text.tokens, options)
    settings = {
        _WITHOUT: None,
        _HOST: {name: value for name, value in options.offload.items() if name not in _DISK_SETTINGS},
        _DISK: options.offload,
    }
    half = max(options.turns // 2, LEAST_BEFORE)
    screen.progress("starting three engines")
    async with _started(options, conversations, settings) as (first, _):
        script: dict[TurnId, tuple[int, ...]] = {}
        for number in range(half):
            screen.progress(f"before the restart: turn {number + 1} of {half}")
            await _play_round(first, number, script)
        screen.progress(f"killing the engines in turn {half + 1}")
        for engine in first.values():
            await engine.play_and_kill(Round(half, script), max(options.conversations // 2, 1))
    screen.progress("starting them again")
    turns: dict[str, list[Turn]] = {name: [] for name in settings}
    problems: list[str] = []
    async with _started(options, conversations, settings) as (second, found):
        for number in range(half, options.turns):
            screen.progress(f"after the restart: turn {number + 1} of {options.turns}")
            for name, played in (await _play_round(second, number, script)).items():
                turns[name] += played.turns
                problems += [f"{name}: {problem}" for problem in played.problems]
        for engine in second.values():
            await engine.end()
    return _result(half, turns, first[_DISK].counted, found[_DISK], second[_DISK].counted, problems)


def render(result: RestartResult) -> list[str]:
    """Return the report's lines; the verdict comes first."""
    variants = result.variants
    times = [milliseconds(each.first_ttft_s) for each in variants.values()]
    later = [milliseconds(each.later_ttft_s) for each in variants.values() if each.later_ttft_s]
    counts = {"tokens computed": "computed_tokens", "prompt tokens found on the device": "device_tokens"}
    counts["prompt tokens found on the host"] = "host_tokens"
    rows = [_row("", "without", "host memory", "and a disk"), "-" * (_LABEL + 3 * _NUMBER)]
    rows.append(_row("first token after it, p50/p99", *times))
    rows += [_row("first token of later turns, p50/p99", *later)] if later else []
    rows += [
        _row(label, *(f"{getattr(each, name):,}" for each in variants.values()))
        for label, name in counts.items()
    ]
    outcome = "Outputs are identical." if result.passed else "Outputs DIFFER, or laws are BROKEN."
    p50 = (variants[_WITHOUT].first_ttft_s.p50 * 1000, variants[_DISK].first_ttft_s.p50 * 1000)
    before, after = result.before, result.after
    missing = before.stored - before.spilled - before.dropped
    spilled = f"{before.spilled:,} of them written to the disk ({size_of(before.written_bytes)})"
    fetched = f"{after.fetched:,} of them fetched ({size_of(after.read_bytes)})"
    lines = [
        f"First token of turns that return after a SIGKILL: {p50[0]:,.0f} -> {p50[1]:,.0f} ms ({result.sooner:.1f}x). {outcome}",
        "",
        f"All engines were killed in turn {result.killed_in_turn} and started again; the times are of what came after.",
        "",
        *rows,
        "",
        f"before it   {before.stored:,} blocks were stored on the host, {spilled}",
        f"not written {missing:,} not found again yet, or still to be written; {before.dropped:,} evicted first",
        f"after it    {result.disk_blocks:,} blocks were found on the disk, {fetched}",
    ]
    lines += [f"audit       {problem}" for problem in result.broken_laws]
    lines += [
        f"outputs     {name}: {each.mismatches} of {each.tokens:,} tokens differ"
        for name, each in result.agreements.items()
        if not each.holds
    ]
    return lines


@asynccontextmanager
async def _started(
    options: DemoOptions,
    conversations: Sequence[Conversation],
    settings: Mapping[str, Mapping[str, object] | None],
) -> AsyncIterator[tuple[dict[str, _Process], dict[str, int]]]:
    """Start an engine for each of the settings; whatever happens, none of them is left."""
    engines: dict[str, _Process] = {}
    try:
        for name, offload in settings.items():
            engines[name] = _start(options, conversations, offload)
        yield engines, {name: await engine.ready() for name, engine in engines.items()}
    finally:
        for engine in engines.values():
            engine.kill()


def _start(
    options: DemoOptions, conversations: Sequence[Conversation], offload: Mapping[str, object] | None
) -> _Process:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, options, conversations, offload), daemon=True)
    process.start()
    theirs.close()  # or its end would not be noticed
    return _Process(process, ours)


async def _play_round(
    engines: Mapping[str, _Process], number: int, script: dict[TurnId, tuple[int, ...]]
) -> dict[str, Played]:
    """Have every engine play a round, one after the other; answers of the first go into all prompts."""
    played = {name: await engine.play(Round(number, script)) for name, engine in engines.items()}
    script.update(
        {turn.turn: tuple(token.token_id for token in turn.answer) for turn in played[_WITHOUT].turns}
    )
    return played


def _result(
    half: int,
    turns: Mapping[str, Sequence[Turn]],
    before: Served,
    disk_blocks: int,
    after: Served,
    problems: Sequence[str],
) -> RestartResult:
    variants = {name: _variant(half, played) for name, played in turns.items()}
    plays = {name: Play(tuple(played), 0.0) for name, played in turns.items()}
    return RestartResult(
        killed_in_turn=half + 1,
        variants=variants,
        sooner=variants[_WITHOUT].first_ttft_s.p50 / variants[_DISK].first_ttft_s.p50,
        before=before,
        disk_blocks=disk_blocks,
        after=after,
        agreements={name: compare(plays[_WITHOUT], plays[name]) for name in (_HOST, _DISK)},
        broken_laws=tuple(problems),
    )


def _variant(half: int, turns: Sequence[Turn]) -> Variant:
    later = [turn.ttft_s for turn in turns if turn.turn.turn > half]
    return Variant(
        first_ttft_s=quantiles([turn.ttft_s for turn in turns if turn.turn.turn == half]),
        later_ttft_s=quantiles(later) if later else None,
        computed_tokens=sum(turn.stats.computed_tokens for turn in turns),
        device_tokens=sum(turn.stats.device_hit_tokens for turn in turns),
        host_tokens=sum(turn.stats.external_tokens for turn in turns),
    )


def _row(label: str, *values: str) -> str:
    return f"{label:<{_LABEL}}" + "".join(f"{value:>{_NUMBER}}" for value in values)
