"""`demo --restart`: three engines play the same conversations, are killed half-way, and start again on what is left.

One has no offloading, one host memory alone, and one a disk below it. They take turns round by round, so that other load on the
machine affects all of them, and each is killed (SIGKILL) in the middle of the same round, which is then played again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from kvoffload.cli.demo.compare import compare
from kvoffload.cli.demo.conversations import TurnId, make_conversations
from kvoffload.cli.demo.documents import read_text
from kvoffload.cli.demo.engine_process import Round, Served
from kvoffload.cli.demo.options import LEAST_BEFORE, DemoOptions
from kvoffload.cli.demo.play import Play, Turn
from kvoffload.cli.demo.processes import Variant, outcome, play_round, problems_of, started, table, variant_of
from kvoffload.cli.demo.results import SCHEMA, Agreement, to_json
from kvoffload.cli.exits import Exit
from kvoffload.cli.report.page import size_of

if TYPE_CHECKING:
    from kvoffload.cli.demo.screen import Screen

_WITHOUT, _HOST, _DISK = "without", "host", "disk"
_DISK_SETTINGS = ("disk_path", "disk_bytes", "disk_bytes_per_rank", "spill_after_hits", "disk_identity")


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
    async with started(options, conversations, settings) as (first, _):
        script: dict[TurnId, tuple[int, ...]] = {}
        for number in range(half):
            screen.progress(f"before the restart: turn {number + 1} of {half}")
            await play_round(first, number, script)
        screen.progress(f"killing the engines in turn {half + 1}")
        for engine in first.values():
            await engine.play_and_kill(Round(half, script), max(options.conversations // 2, 1))
    screen.progress("starting them again")
    turns: dict[str, list[Turn]] = {name: [] for name in settings}
    problems: list[str] = []
    async with started(options, conversations, settings) as (second, found):
        for number in range(half, options.turns):
            screen.progress(f"after the restart: turn {number + 1} of {options.turns}")
            for name, played in (await play_round(second, number, script)).items():
                turns[name] += played.turns
                problems += [f"{name}: {problem}" for problem in played.problems]
        for engine in second.values():
            await engine.end()
    return _result(
        half, turns, first[_DISK].counted, found[_DISK].disk_blocks, second[_DISK].counted, problems
    )


def render(result: RestartResult) -> list[str]:
    """Return the report's lines; the verdict comes first."""
    variants = result.variants
    p50 = (variants[_WITHOUT].first_ttft_s.p50 * 1000, variants[_DISK].first_ttft_s.p50 * 1000)
    before, after = result.before, result.after
    missing = before.stored - before.spilled - before.dropped
    spilled = f"{before.spilled:,} of them written to the disk ({size_of(before.written_bytes)})"
    fetched = f"{after.fetched:,} of them fetched ({size_of(after.read_bytes)})"
    lines = [
        f"First token of turns that return after a SIGKILL: {p50[0]:,.0f} -> {p50[1]:,.0f} ms ({result.sooner:.1f}x). {outcome(passed=result.passed)}",
        "",
        f"All engines were killed in turn {result.killed_in_turn} and started again; the times are of what came after.",
        "",
        *table(("without", "host memory", "and a disk"), variants, "after it"),
        "",
        f"before it   {before.stored:,} blocks were stored on the host, {spilled}",
        f"not written {missing:,} not found again yet, or still to be written; {before.dropped:,} evicted first",
        f"after it    {result.disk_blocks:,} blocks were found on the disk, {fetched}",
    ]
    return [*lines, *problems_of(result.broken_laws, result.agreements)]


def _result(
    half: int,
    turns: Mapping[str, Sequence[Turn]],
    before: Served,
    disk_blocks: int,
    after: Served,
    problems: Sequence[str],
) -> RestartResult:
    variants = {name: variant_of(half, played) for name, played in turns.items()}
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
