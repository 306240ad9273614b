"""Runs one demo, and returns its exit code.

plain run       The two engines alternate after each round, so that other load on the machine affects both alike.
continued run   An engine in a separate process begins the conversations and is killed (SIGKILL) in the middle of a
                round. The two engines then continue with that round and the answers of the completed rounds.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import asdict
from itertools import count
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from kvoffload.cli.demo import results
from kvoffload.cli.demo.engines import Engines, audit, engine_config, kv_blocks, open_engine, open_engines
from kvoffload.cli.demo.options import DemoOptions
from kvoffload.cli.demo.play import Answers, Player, Turn, TurnId, make_conversations, warm_up
from kvoffload.cli.demo.results import Numbers
from kvoffload.cli.exits import CommandError, Exit
from kvoffload.model.wire import LOWER_TIERS, Tier
from kvoffload.runtime.disk_catalog import DiskCatalog
from kvoffload.runtime.host_catalog import HostCatalog
from kvoffload.telemetry.catalogue import TierState, tier_state
from kvoffload.telemetry.exporter import KVOffloadCollector, serve

if TYPE_CHECKING:
    import argparse

    from kvoffload.cli.demo.screen import Screen
    from kvoffload.engine import Engine
    from kvoffload.runtime.scheduler_side import SchedulerSide

_TIMEOUT_S = 30.0  # the time limit for host memory and the tiers below it to become ready
_POLL_S = 0.01


async def run_demo(options: DemoOptions, screen: Screen, args: argparse.Namespace) -> int:
    """Run the demo, print its result, and return its exit code.

    Args:
        options: the conversations and engines.
        screen: prints progress and the result.
        args: the parsed options, of which the options about JSON output and metrics are used.

    Raises:
        KVOffloadError: the demo cannot run with its options.
        EngineError: an engine does not accept its settings, or has stopped.
    """
    engine_config(options)  # raises an error for invalid sizes and devices before any process starts
    registry = CollectorRegistry()
    # Open the port first, so that an error ends the demo at once.
    with serve(registry, *args.serve_metrics) if args.serve_metrics else nullcontext() as url:
        answers, before = ({}, None) if options.killed_in is None else await _begun(options, screen)
        async with _engines(options, screen) as engines:
            if url is not None:
                registry.register(KVOffloadCollector(engines.offload))
                screen.say(f"metrics are at {url}")
            result = {**await _play(options, engines, answers, screen), "before": before}
        screen.result(json.dumps(result, indent=2) if args.json else results.render(result))
        if not result["passed"]:
            screen.say(f"FAILED: {'the audit found problems' if result['audit'] else 'outputs differ'}")
        if url is not None and args.serve_for:
            screen.say(f"metrics stay at {url} for {args.serve_for:g} s; Ctrl-C or SIGTERM ends that")
            await asyncio.sleep(args.serve_for)
    return Exit.OK if result["passed"] else Exit.FAILED


async def play_until_killed(options: DemoOptions) -> int:
    """Play the conversations until this process is killed, and print a line of JSON after each turn.

    Raises:
        KVOffloadError: the engine cannot run with the given options.
        EngineError: the engine stopped.
    """
    async with open_engine(options) as (engine, offload):
        await _become_ready(engine, offload, options)
        before = offload.counters.snapshot()

        def report(turn: Turn) -> None:
            counted = offload.counters.snapshot().minus(before)
            stored = counted.count("kvoffload_store_blocks_total", "stored")
            answer = [token.token_id for token in turn.answer]
            counts = {"stored_blocks": stored, "tiers": results.tier_numbers(counted)}
            print(json.dumps([turn.turn, answer, counts]), flush=True)

        player = Player(engine, make_conversations(options), options, report)
        for number in range(options.turns):
            await player.play_round(number)
            # The kill would lose what the disk's index does not have yet: all blocks, if the rounds are short.
            if isinstance(disk := offload.catalogs.get(Tier.DISK), DiskCatalog):
                await asyncio.wrap_future(disk.write())
    return Exit.OK


async def _begun(options: DemoOptions, screen: Screen) -> tuple[Answers, Numbers]:
    """Begin the conversations with an engine in another process, and kill that process in the middle of a round.

    Returns:
        The answers in the completed rounds, and the numbers of blocks stored and copied to lower tiers.

    Raises:
        CommandError: the process ended before the kill.
    """
    assert options.killed_in is not None
    turns = options.killed_in * options.conversations + max(options.conversations // 2, 1)
    screen.progress("starting an engine that will be killed")
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvoffload", "demo", "--until-killed", json.dumps(asdict(options))),
        stdin=DEVNULL,
        stdout=PIPE,
        start_new_session=True,  # Ctrl-C in a terminal then does not signal the child
    )

    assert child.stdout is not None
    answers: dict[TurnId, list[int]] = {}
    try:
        for served in range(turns):
            if not (line := await child.stdout.readline()):
                code = await child.wait()
                raise CommandError(f"the engine that begins ended by itself, with exit code {code}")
            turn, answer, counts = json.loads(line)
            answers[TurnId(*turn)] = answer
            screen.progress(f"before the kill: {served + 1} of {turns} turns")
    finally:
        with suppress(ProcessLookupError):
            child.kill()
        await child.wait()
    earlier = {turn: answer for turn, answer in answers.items() if turn.turn < options.killed_in}
    return earlier, counts


@asynccontextmanager
async def _engines(options: DemoOptions, screen: Screen) -> AsyncIterator[Engines]:
    """Start both engines. If a signal ends the demo, print how the submitted copies ended."""
    running: Engines | None = None
    try:
        async with open_engines(options) as running:
            try:
                yield running
            except asyncio.CancelledError:
                screen.say("interrupted: open requests are cancelled, and submitted copies drain")
                raise
    except asyncio.CancelledError:
        if running is not None:
            screen.say(_drained(running))
        raise


async def _become_ready(engine: Engine, offload: SchedulerSide, options: DemoOptions) -> None:
    """Serve warm-up prompts until host memory is ready and the lower tiers are open.

    The ranks report progress only in the engine's steps, and the engine steps only while it serves a prompt.

    Raises:
        CommandError: the lower tier of a continued demo does not open in time.
    """
    clock = asyncio.get_running_loop().time
    deadline = clock() + _TIMEOUT_S
    while True:
        # The process id is the prompt's seed, so that a lower tier has no blocks of the prompt from an earlier run.
        await warm_up(engine, options.first_tokens, os.getpid())
        states = {tier_state(offload, tier) for tier in LOWER_TIERS}
        is_open = states <= {TierState.OPEN, None}
        is_ready = offload.state.pool.capacity and not (
            offload.state.growing and Tier.HOST in offload.catalogs
        )
        if (is_ready and is_open) or clock() > deadline:
            break
        await asyncio.sleep(_POLL_S)
    if options.killed_in is not None and not is_open:
        raise CommandError(f"a lower tier is not open after {_TIMEOUT_S:g} s; the log is above")


async def _play(options: DemoOptions, engines: Engines, answers: Answers, screen: Screen) -> Numbers:
    """Play the conversations on both engines, which alternate after each round, and return the demo's result."""
    screen.progress("warming up")
    await warm_up(engines.plain, options.first_tokens, options.seed)
    await _become_ready(engines.offloaded, engines.offload, options)
    counters, config = engines.offload.counters, engines.plain.config
    counted, benefit = counters.snapshot(), _benefit(engines.offload)
    conversations, rounds = make_conversations(options), range(options.killed_in or 0, options.turns)
    turns = options.conversations * len(rounds)

    def counter(name: str) -> Callable[[Turn], None]:
        served = count(1)
        return lambda _: screen.progress(f"{name} offloading: {next(served)} of {turns} turns")

    plain = Player(engines.plain, conversations, options, counter("without"))
    plain.answers.update(answers)
    offloaded = Player(engines.offloaded, conversations, options, counter("with"), plain.answers)
    for number in rounds:
        await plain.play_round(number)
        await offloaded.play_round(number)
    host = engines.offload.catalogs.get(Tier.HOST)
    agreement, problems = results.compare(plain.turns, offloaded.turns), audit(engines)
    return {
        "passed": not agreement["mismatches"] and not problems,
        "options": asdict(options),
        "device_blocks": engines.plain.pool.usable_blocks,
        "kv_blocks": kv_blocks(options, config),
        "host_slots": engines.offload.core.state.pool.capacity,
        "adopted_blocks": host.adopted if isinstance(host, HostCatalog) else 0,
        "without_offloading": results.play_numbers(plain, options, config.block_tokens),
        "with_offloading": results.play_numbers(offloaded, options, config.block_tokens),
        "offloading": results.offload_numbers(counters.snapshot().minus(counted)),
        "benefit": {name: value - benefit[name] for name, value in _benefit(engines.offload).items()},
        "tiers": results.tier_numbers(counters.snapshot()),
        "agreement": agreement,
        "audit": problems,
    }


def _benefit(offload: SchedulerSide) -> dict[str, float]:
    benefit = offload.benefit
    waited_s, lost_s = benefit.waited_s, sum(benefit.interference_s.values())
    return {"saved_s": benefit.saved_s, "waited_s": waited_s, "lost_s": lost_s}


def _drained(engines: Engines) -> str:
    copies = engines.offload.counters.snapshot().total("kvoffload_transfers_total")
    if problems := audit(engines):
        return "; ".join([f"drained, but the audit found {len(problems)} problems", *problems])
    return f"drained: all {copies} copies that were submitted have ended; the audit passed"
