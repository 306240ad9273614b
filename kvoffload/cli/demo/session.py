"""One demo, from its options to its exit code."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from kvoffload.cli.demo.audit import audit_engine, audit_offloading
from kvoffload.cli.demo.compare import compare
from kvoffload.cli.demo.conversations import Conversation, make_conversations
from kvoffload.cli.demo.documents import Text, read_text
from kvoffload.cli.demo.engines import Engines, kv_blocks, open_engines
from kvoffload.cli.demo.options import DemoOptions
from kvoffload.cli.demo.play import Play, Player, warm_up
from kvoffload.cli.demo.results import DemoResult, PlayResult, Workload
from kvoffload.cli.demo.screen import Screen
from kvoffload.cli.demo.summary import summarize, summarize_benefit, summarize_offloading
from kvoffload.cli.demo.table import render
from kvoffload.cli.exits import Exit, OutputError
from kvoffload.telemetry.exporter import KVOffloadCollector
from kvoffload.telemetry.server import MetricsServer, serve

if TYPE_CHECKING:
    from kvoffload.engine import Engine
    from kvoffload.runtime.scheduler_side import SchedulerSide

_TAIL = 20  # lines of the journal shown after a failure
_PATIENCE_S = 20.0  # for the first host memory, which takes milliseconds on an idle machine


async def run_demo(options: DemoOptions, screen: Screen) -> int:
    """Run the demo and return its exit code.

    Raises:
        KVOffloadError: something in the options is not possible; nothing has been run.
        EngineError: as above, or the engine stopped.
    """
    text = read_text(options.documents, options.conversations * options.message_tokens)
    registry = CollectorRegistry()
    # The port is opened first, so that a bad one stops the demo at its start.
    with serve(registry, *options.metrics) if options.metrics else nullcontext() as page:
        async with _engines(options, screen) as engines:
            if page is not None:
                registry.register(KVOffloadCollector(engines.offload.counters, engines.offload))
                screen.say(f"metrics are at {page.url}")
            code = await _demonstrate(options, engines, text, screen)
        if page is not None and options.serve_for_s:
            await _linger(page, options.serve_for_s, screen)
    return code


@asynccontextmanager
async def _engines(options: DemoOptions, screen: Screen) -> AsyncIterator[Engines]:
    """Open both engines. After a signal, report how the submitted copies ended."""
    running: Engines | None = None
    try:
        async with open_engines(options) as running:
            try:
                yield running
            except asyncio.CancelledError:
                screen.say("interrupted: open requests are cancelled, and submitted copies drain")
                raise
            except (OSError, OutputError):
                raise  # output that cannot be written says nothing about offloading
            except Exception:
                _show_journal(running.offload, screen)
                raise
    except asyncio.CancelledError:
        if running is not None:
            screen.say(_drained(running))
        raise


async def _demonstrate(options: DemoOptions, engines: Engines, text: Text, screen: Screen) -> int:
    conversations = make_conversations(text.tokens, options)
    screen.progress("warming up")
    await _warm_up(options, engines)
    before, benefit = engines.offload.counters.snapshot(), engines.offload.benefit.series()
    plain, offloaded = await _play(options, engines, conversations, screen)
    counted = engines.offload.counters.snapshot().minus(before)
    size = engines.plain.config.block_tokens
    without, with_ = summarize(plain, size), summarize(offloaded, size)
    result = DemoResult(
        workload=_workload(options, engines.plain, text),
        without_offloading=without,
        with_offloading=with_,
        returning_ttft_ratio=_ratio(without, with_),
        offloading=summarize_offloading(
            counted,
            engines.offload.gauges().capacity_slots,
            summarize_benefit(benefit, engines.offload.benefit.series()),
        ),
        agreement=compare(plain, offloaded),
        broken_laws=tuple(_audit(engines)),
        provenance=engines.offload.provenance,
    )
    screen.result(result.to_json() if options.as_json else render(result))
    if result.passed:
        return Exit.OK
    screen.say("FAILED: outputs differ" if not result.agreement.holds else "FAILED: laws are broken")
    _show_journal(engines.offload, screen)
    return Exit.FAILED


async def _warm_up(options: DemoOptions, engines: Engines) -> None:
    """Serve a prompt on each engine, and repeat until some host memory is ready.

    It is prepared in the background, and ranks report it in steps: a short demo could end before that.
    """
    await warm_up(engines.plain, options.first_tokens, options.seed)
    clock = asyncio.get_running_loop().time
    deadline = clock() + _PATIENCE_S
    while True:
        await warm_up(engines.offloaded, options.first_tokens, options.seed)
        if engines.offload.gauges().capacity_slots or clock() >= deadline:
            return


async def _play(
    options: DemoOptions, engines: Engines, conversations: list[Conversation], screen: Screen
) -> tuple[Play, Play]:
    """Play without and with offloading, alternating by round, so that other load on the machine affects both alike."""
    make = partial(Player, conversations=conversations, options=options)
    counter = partial(_counter, options.conversations * options.turns, screen)
    plain = make(engines.plain, on_turn=counter("without offloading"))
    offloaded = make(engines.offloaded, on_turn=counter("with offloading"), script=plain.answers)
    for number in range(options.turns):
        await plain.play_round(number)
        await offloaded.play_round(number)
    return plain.result(), offloaded.result()


def _counter(turns: int, screen: Screen, name: str) -> Callable[[], None]:
    served = count(1)
    return lambda: screen.progress(f"{name}: {next(served)} of {turns} turns")


async def _linger(page: MetricsServer, seconds: float, screen: Screen) -> None:
    screen.say(f"metrics stay at {page.url} for {seconds:g} s; Ctrl-C or SIGTERM ends that")
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        # The demo is over and its result is printed, so this is a normal end.
        if (task := asyncio.current_task()) is not None:
            task.uncancel()


def _workload(options: DemoOptions, engine: Engine, text: Text) -> Workload:
    blocks = kv_blocks(options, engine.config)
    return Workload(
        documents=text.documents,
        library_tokens=text.library_tokens,
        conversations=options.conversations,
        turns=options.turns,
        attention=options.attention,
        reach_tokens=options.reach_tokens,
        device=options.device,
        seed=options.seed,
        device_blocks=engine.pool.usable_blocks,
        kv_blocks=blocks,
        kv_to_cache=blocks / engine.pool.usable_blocks,
        offload=dict(options.offload),
    )


def _ratio(without: PlayResult, with_: PlayResult) -> float | None:
    if without.returning_ttft_s is None or with_.returning_ttft_s is None:
        return None
    return without.returning_ttft_s.p50 / with_.returning_ttft_s.p50


def _audit(engines: Engines) -> list[str]:
    plain = audit_engine(engines.plain, "engine without offloading")
    offloaded = audit_engine(engines.offloaded, "engine with offloading")
    return [*plain, *offloaded, *audit_offloading(engines.offload)]


def _drained(engines: Engines) -> str:
    copies = engines.offload.counters.snapshot().total("kvoffload_transfers_total")
    if laws := _audit(engines):
        return "; ".join([f"drained, but {len(laws)} laws are broken", *laws])
    return f"drained: all {copies} copies that were submitted have ended; no law is broken"


def _show_journal(offload: SchedulerSide, screen: Screen) -> None:
    screen.say("the last of the journal:")
    for line in offload.journal.tail(_TAIL):
        screen.detail(f"  {line}")
