"""`demo --restart`: three engines play the same conversations, are killed half-way, and start again on what is left.

One has no offloading, one host memory alone, and one a disk below it. They take turns round by round, so that other load on the
machine affects all of them, and each is killed (SIGKILL) in the middle of the same round, which is then played again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvoffload.cli.demo.conversations import TurnId, make_conversations
from kvoffload.cli.demo.documents import read_text
from kvoffload.cli.demo.engine_process import Round, Served
from kvoffload.cli.demo.options import LEAST_BEFORE, DemoOptions
from kvoffload.cli.demo.processes import ContinuedResult, compared, play_rounds, started, table
from kvoffload.model.config import size_text

if TYPE_CHECKING:
    from kvoffload.cli.demo.screen import Screen

_WITHOUT, _HOST, _DISK = "without", "host", "disk"
_DISK_SETTINGS = ("disk_path", "disk_bytes", "disk_bytes_per_rank", "spill_after_hits", "disk_identity")


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartResult(ContinuedResult):
    """The result of `demo --restart`; its variants are without offloading, with host memory, and with a disk below that.

    Args:
        killed_in_turn: number of the turn that was under way, from 1.
        sooner: median time to first token after the restart, recomputed over with the disk.
        before: the last counts of the engine with the disk before it was killed.
        disk_blocks: blocks that the next process found on the disk.
        after: what that process counted.
    """

    kind: ClassVar[str] = "restart"
    killed_in_turn: int
    sooner: float
    before: Served
    disk_blocks: int
    after: Served


async def run_restart(options: DemoOptions, screen: Screen) -> int:
    """Run it and return the exit code.

    Raises:
        CommandError: it cannot run as asked, or an engine's process failed.
    """
    result = await play_restart(options, screen)
    return result.show(render(result), screen, as_json=options.as_json)


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
        _, problems = await play_rounds(
            first, range(half), script, lambda turn: screen.progress(f"before the restart: {turn}")
        )
        screen.progress(f"killing the engines in turn {half + 1}")
        for engine in first.values():
            await engine.play_and_kill(Round(half, script), max(options.conversations // 2, 1))
    screen.progress("starting them again")
    async with started(options, conversations, settings) as (second, found):
        turns, later_problems = await play_rounds(
            second,
            range(half, options.turns),
            script,
            lambda turn: screen.progress(f"after the restart: {turn}"),
        )
        for engine in second.values():
            await engine.end()
    variants, agreements = compared(half, turns)
    return RestartResult(
        variants=variants,
        agreements=agreements,
        broken_laws=(*problems, *later_problems),
        killed_in_turn=half + 1,
        sooner=variants[_WITHOUT].first_ttft_s.p50 / variants[_DISK].first_ttft_s.p50,
        before=first[_DISK].counted,
        disk_blocks=found[_DISK].disk_blocks,
        after=second[_DISK].counted,
    )


def render(result: RestartResult) -> list[str]:
    """Return the report's lines; the verdict comes first."""
    before, after = result.before, result.after
    missing = before.stored - before.spilled - before.dropped
    spilled = f"{before.spilled:,} of them written to the disk ({size_text(before.written_bytes)})"
    fetched = f"{after.fetched:,} of them fetched ({size_text(after.read_bytes)})"
    return [
        result.verdict("First token of turns that return after a SIGKILL", _DISK),
        "",
        f"All engines were killed in turn {result.killed_in_turn} and started again; the times are of what came after.",
        "",
        *table(("without", "host memory", "and a disk"), result.variants.values(), "after it", {}),
        "",
        f"before it   {before.stored:,} blocks were stored on the host, {spilled}",
        f"not written {missing:,} not found again yet, or still to be written; {before.dropped:,} evicted first",
        f"after it    {result.disk_blocks:,} blocks were found on the disk, {fetched}",
        *result.problems(),
    ]
