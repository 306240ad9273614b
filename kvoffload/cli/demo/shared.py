"""`demo --remote`: conversations that one engine began continue on others, which share a store with it.

The first engine serves half of the turns, the middle one too. Then every conversation continues on each of the other engines, and on
one without offloading, which has to compute all of it. These engines take turns round by round, so that other load on the machine
affects all of them.
Each engine is a process of its own: they share the store and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvoffload.cli.demo.conversations import TurnId, make_conversations
from kvoffload.cli.demo.documents import read_text
from kvoffload.cli.demo.engine_process import Ready, Served
from kvoffload.cli.demo.options import DemoOptions
from kvoffload.cli.demo.processes import ContinuedResult, compared, play_rounds, started, table
from kvoffload.cli.exits import CommandError
from kvoffload.model.config import size_text
from kvoffload.remote.bucket import LOOK_PERIOD_S
from kvoffload.telemetry.labels import TierState

if TYPE_CHECKING:
    from kvoffload.cli.demo.screen import Screen

_WITHOUT, _FIRST = "recomputed", "engine 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedResult(ContinuedResult):
    """The result of `demo --remote`.

    Args:
        store: its address.
        continued_in_turn: number of the first turn on other engines, from 1.
        sooner: median time to first token of those turns, recomputed over that of each engine with the store.
        first: what the first engine counted.
        others: what each of the others counted.
    """

    kind: ClassVar[str] = "shared"
    store: str
    continued_in_turn: int
    sooner: Mapping[str, float]
    first: Served
    others: Mapping[str, Served]


async def run_shared(options: DemoOptions, screen: Screen) -> int:
    """Run it and return the exit code.

    Raises:
        CommandError: it cannot run as asked, or an engine's process failed.
    """
    result = await play_shared(options, screen)
    return result.show(render(result), screen, as_json=options.as_json)


async def play_shared(options: DemoOptions, screen: Screen) -> SharedResult:
    """Play on the first engine, then on the others.

    Raises:
        CommandError: an engine's process failed, or does not reach the store.
    """
    text = read_text(options.documents, options.conversations * options.message_tokens)
    conversations = make_conversations(text.tokens, options)
    sharing = [f"engine {number}" for number in range(1, options.engines + 1)]
    settings = {_WITHOUT: None, **dict.fromkeys(sharing, options.offload)}
    half = (options.turns + 1) // 2
    screen.progress(f"starting {len(settings)} engines")
    async with started(options, conversations, settings) as (engines, ready):
        check_ready(ready)
        first = engines.pop(_FIRST)
        script: dict[TurnId, tuple[int, ...]] = {}
        _, problems = await play_rounds(
            {_FIRST: first}, range(half), script, lambda turn: screen.progress(f"{_FIRST}: {turn}")
        )
        await asyncio.sleep(LOOK_PERIOD_S)  # a bucket may have been listed just before the last writes
        turns, later_problems = await play_rounds(
            engines, range(half, options.turns), script, lambda turn: screen.progress(f"the others: {turn}")
        )
        for engine in (first, *engines.values()):
            await engine.end()
    variants, agreements = compared(half, turns)
    recomputed = variants[_WITHOUT].first_ttft_s.p50
    return SharedResult(
        variants=variants,
        agreements=agreements,
        broken_laws=(*problems, *later_problems),
        store=str(options.offload["remote_url"]),
        continued_in_turn=half + 1,
        sooner={name: recomputed / variants[name].first_ttft_s.p50 for name in agreements},
        first=first.counted,
        others={name: engines[name].counted for name in agreements},
    )


def render(result: SharedResult) -> list[str]:
    """Return the report's lines; the verdict comes first."""
    variants, first = result.variants, result.first
    slowest = min(result.sooner, key=lambda name: result.sooner[name])
    fetched = [result.others[name].fetched_tokens if name in result.others else 0 for name in variants]
    missing = first.stored - first.spilled - first.dropped
    written = f"{first.spilled:,} of them written to the store ({size_text(first.written_bytes)})"
    begun = result.continued_in_turn - 1
    of_these = {"  of these, fetched from the store": fetched}
    lines = [
        result.verdict("First token of turns that continue on another engine", slowest),
        "",
        f"{_FIRST} served the first {begun} turns of every conversation; each of the engines below continued them.",
        f"The store is {result.store}.",
        "",
        *table(list(variants), variants.values(), "next turn", of_these),
        "",
        f"{_FIRST:<12}{first.stored:,} blocks were stored on the host, {written}",
        f"not written {missing:,} not found again yet, or still to be written; {first.dropped:,} evicted first",
    ]
    lines += [
        f"{name:<12}{other.fetched:,} blocks were fetched from the store ({size_text(other.read_bytes)}), "
        f"{other.spilled:,} written to it"
        for name, other in result.others.items()
    ]
    return [*lines, *result.problems()]


def check_ready(ready: Mapping[str, Ready]) -> None:
    """Check that all engines have reached the store.

    Raises:
        CommandError: one has not.
    """
    for name, found in ready.items():
        if name != _WITHOUT and found.remote is not TierState.OPEN:
            raise CommandError(f"{name} does not reach the store; its log is above")
