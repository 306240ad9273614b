"""`demo --remote`: conversations that one engine began continue on others, which share a store with it.

The first engine serves half of the turns. Then every conversation continues on each of the other engines, and on one without
offloading, which has to compute all of it. Those take turns round by round, so that other load on the machine affects all of them.
Each engine is a process of its own: they share the store and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from kvoffload.cli.demo.compare import compare
from kvoffload.cli.demo.conversations import TurnId, make_conversations
from kvoffload.cli.demo.documents import read_text
from kvoffload.cli.demo.engine_process import Played, Ready, Served
from kvoffload.cli.demo.options import LEAST_BEFORE, DemoOptions
from kvoffload.cli.demo.play import Play, Turn
from kvoffload.cli.demo.processes import (
    Variant,
    outcome,
    play_round,
    problems_of,
    row,
    started,
    table,
    variant_of,
)
from kvoffload.cli.demo.results import SCHEMA, Agreement, to_json
from kvoffload.cli.exits import CommandError, Exit
from kvoffload.cli.report.page import size_of
from kvoffload.telemetry.labels import TierState

if TYPE_CHECKING:
    from kvoffload.cli.demo.screen import Screen

_WITHOUT, _FIRST = "recomputed", "engine 1"


@dataclass(frozen=True, slots=True)
class SharedResult:
    """The result of `demo --remote`.

    Args:
        store: its address.
        continued_in_turn: number of the first turn on other engines, from 1.
        variants: by the engine's name; the first one has no offloading.
        sooner: median time to first token of those turns, recomputed over that of each engine with the store.
        first: what the first engine counted.
        others: what each of the others counted.
        agreements: outputs compared with those without offloading.
        broken_laws: as text.
    """

    store: str
    continued_in_turn: int
    variants: Mapping[str, Variant]
    sooner: Mapping[str, float]
    first: Served
    others: Mapping[str, Served]
    agreements: Mapping[str, Agreement]
    broken_laws: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether outputs agree and no law is broken."""
        return not self.broken_laws and all(each.holds for each in self.agreements.values())

    def to_json(self) -> str:
        """Return one object: the fields, `schema` and `passed`."""
        return to_json({"schema": SCHEMA, "kind": "shared", "passed": self.passed, **asdict(self)})


async def run_shared(options: DemoOptions, screen: Screen) -> int:
    """Run it and return the exit code.

    Raises:
        CommandError: it cannot run as asked, or an engine's process failed.
    """
    result = await play_shared(options, screen)
    screen.result(result.to_json() if options.as_json else "\n".join(render(result)))
    return Exit.OK if result.passed else Exit.FAILED


async def play_shared(options: DemoOptions, screen: Screen) -> SharedResult:
    """Play on the first engine, then on the others.

    Raises:
        CommandError: an engine's process failed, or does not reach the store.
    """
    text = read_text(options.documents, options.conversations * options.message_tokens)
    conversations = make_conversations(text.tokens, options)
    sharing = [f"engine {number}" for number in range(1, options.engines + 1)]
    settings = {_WITHOUT: None, **dict.fromkeys(sharing, options.offload)}
    half = max(options.turns // 2, LEAST_BEFORE)
    problems: list[str] = []
    screen.progress(f"starting {len(settings)} engines")
    async with started(options, conversations, settings) as (engines, ready):
        check_ready(ready)
        first = engines.pop(_FIRST)
        script: dict[TurnId, tuple[int, ...]] = {}
        for number in range(half):
            screen.progress(f"{_FIRST}: turn {number + 1} of {half}")
            played = await play_round({_FIRST: first}, number, script)
            problems += _problems(played)
        turns: dict[str, list[Turn]] = {name: [] for name in engines}
        for number in range(half, options.turns):
            screen.progress(f"the others: turn {number + 1} of {options.turns}")
            played = await play_round(engines, number, script)
            problems += _problems(played)
            for name, one in played.items():
                turns[name] += one.turns
        for engine in (first, *engines.values()):
            await engine.end()
    counted = {name: engine.counted for name, engine in engines.items()}
    return _result(str(options.offload["remote_url"]), half, turns, first.counted, counted, problems)


def render(result: SharedResult) -> list[str]:
    """Return the report's lines; the verdict comes first."""
    variants, first = result.variants, result.first
    slowest = min(result.sooner, key=lambda name: result.sooner[name])
    times = [variants[name].first_ttft_s.p50 * 1000 for name in (_WITHOUT, slowest)]
    fetched = [result.others[name].fetched_tokens if name in result.others else 0 for name in variants]
    missing = first.stored - first.spilled - first.dropped
    verdict = f"{times[0]:,.0f} -> {times[1]:,.0f} ms ({result.sooner[slowest]:.1f}x). {outcome(passed=result.passed)}"
    written = f"{first.spilled:,} of them written to the store ({size_of(first.written_bytes)})"
    begun = result.continued_in_turn - 1
    lines = [
        f"First token of turns that continue on another engine: {verdict}",
        "",
        f"{_FIRST} served the first {begun} turns of every conversation; each of the engines below continued them.",
        f"The store is {result.store}.",
        "",
        *table(list(variants), variants, "next turn"),
        row("  of these, fetched from the store", *(f"{tokens:,}" for tokens in fetched)),
        "",
        f"{_FIRST:<12}{first.stored:,} blocks were stored on the host, {written}",
        f"not written {missing:,} not found again yet, or still to be written; {first.dropped:,} evicted first",
    ]
    lines += [
        f"{name:<12}{other.fetched:,} blocks were fetched from the store ({size_of(other.read_bytes)}), "
        f"{other.spilled:,} written to it"
        for name, other in result.others.items()
    ]
    return [*lines, *problems_of(result.broken_laws, result.agreements)]


def check_ready(ready: Mapping[str, Ready]) -> None:
    """Check that all engines have reached the store.

    Raises:
        CommandError: one has not.
    """
    for name, found in ready.items():
        if name != _WITHOUT and found.remote is not TierState.OPEN:
            raise CommandError(f"{name} does not reach the store; its log is above")


def _problems(played: Mapping[str, Played]) -> list[str]:
    return [f"{name}: {problem}" for name, one in played.items() for problem in one.problems]


def _result(
    store: str,
    half: int,
    turns: Mapping[str, Sequence[Turn]],
    first: Served,
    others: Mapping[str, Served],
    problems: Sequence[str],
) -> SharedResult:
    variants = {name: variant_of(half, played) for name, played in turns.items()}
    plays = {name: Play(tuple(played), 0.0) for name, played in turns.items()}
    recomputed = variants[_WITHOUT].first_ttft_s.p50
    sharing = [name for name in turns if name != _WITHOUT]
    return SharedResult(
        store=store,
        continued_in_turn=half + 1,
        variants=variants,
        sooner={name: recomputed / variants[name].first_ttft_s.p50 for name in sharing},
        first=first,
        others={name: others[name] for name in sharing},
        agreements={name: compare(plays[_WITHOUT], plays[name]) for name in sharing},
        broken_laws=tuple(problems),
    )
