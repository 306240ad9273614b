"""`kvoffload bench serve`: what offloading costs and brings a stock vLLM, beside vLLM's own `SimpleCPUOffloadConnector`.

Engines without a connector, with this one and with the peer's take turns in one process, each on the same prompts, so that
whatever else the machine does meets all alike.

* Prompts that never repeat: throughput over that without a connector, until nothing is left to do, open copies included.
* Turns that come back: conversations need four times the device's cache, so the device has forgotten each one by its next
  turn. Time from the request to its first token, over recomputing and over the peer.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvoffload.bench import drawings
from kvoffload.bench.output import add_output_arguments, check_output, give_out, heading
from kvoffload.bench.results import machine
from kvoffload.bench.spread import Spread
from kvoffload.cli.exits import Exit
from kvoffload.cli.parser import positive
from kvoffload_vllm.bench_engines import BLOCK, Rider, require_vllm, write_checkpoint
from kvoffload_vllm.bench_hooks import add_peer_argument, find_connectors

HELP = "throughput and time to first token of a stock vLLM with offloading, beside vLLM's own connector"

PLAIN, OURS, PEER = "plain", "kvoffload", "peer"
AT_ONCE = 2
PROMPT_TOKENS = 1024
TURN_TOKENS = 64
TURNS = 3
_CACHE_SHARE = 4
_VOCABULARY = 64
_SHAPE: Mapping[str, Any] = {  # large enough that computing a prompt takes longer than scheduling it
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 4,
}


@dataclass(frozen=True, slots=True)
class Measured:
    """What every engine gave.

    Args:
        rates: prompt and new tokens per second of each repeat, by engine, on prompts that never repeat.
        first_s: seconds to the first token of each returning turn, by engine.
        kv_to_cache: how many times the device's cache the conversations need.
    """

    rates: Mapping[str, Sequence[float]]
    first_s: Mapping[str, Sequence[float]]
    kv_to_cache: float

    def throughput(self, name: str) -> Spread:
        """Throughput over that without a connector, in pairs."""
        pairs = zip(self.rates[name], self.rates[PLAIN], strict=True)
        return Spread.of([mine / plain for mine, plain in pairs])

    def sooner(self, name: str, than: str) -> Spread:
        """How many times sooner a returning turn's first token comes on one engine than on another, in pairs."""
        pairs = zip(self.first_s[name], self.first_s[than], strict=True)
        return Spread.of([other / mine for mine, other in pairs])

    def to_plain(self) -> dict[str, object]:
        """Return it for JSON."""
        connectors = [name for name in self.rates if name != PLAIN]
        return {
            "no_reuse": {
                "repeats": len(self.rates[PLAIN]),
                "tokens_per_s": {name: Spread.of(found).to_plain() for name, found in self.rates.items()},
                "over_plain": {name: self.throughput(name).to_plain() for name in connectors},
            },
            "returning_turns": {
                "turns": len(self.first_s[PLAIN]),
                "working_set_to_cache": round(self.kv_to_cache, 2),
                "first_token_ms": {
                    name: Spread.of([1e3 * one for one in found]).to_plain()
                    for name, found in self.first_s.items()
                },
                "times_sooner_than_recomputing": {
                    name: self.sooner(name, PLAIN).to_plain() for name in connectors
                },
                "times_sooner_than_peer": self.sooner(OURS, PEER).to_plain() if PEER in self.rates else None,
            },
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say which options there are."""
    parser.add_argument("--pairs", type=positive, default=20, help="repeats of prompts that never repeat")
    parser.add_argument("--conversations", type=positive, default=12, help="whose turns come back")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    add_peer_argument(parser)
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print.

    Raises:
        CommandError: there is no vLLM here, or the results cannot be written.
    """
    require_vllm()
    check_output(args)
    about = machine("vllm")
    connectors, note = find_connectors(args.peer)
    measured = measure(connectors, args.pairs, args.conversations, args.seed)
    told = {"machine": about, "peer": note, "method": method(args), **measured.to_plain()}
    give_out("serve", told, args, _table(told, measured), drawings.serve)
    return Exit.OK


def measure(
    connectors: Mapping[str, Mapping[str, Any]], pairs: int, conversations: int, seed: int = 0
) -> Measured:
    """Measure every connector and none; `find_connectors` comes first."""
    longest = PROMPT_TOKENS + TURNS * TURN_TOKENS
    needed = conversations * (longest // BLOCK)
    blocks = max(needed // _CACHE_SHARE, AT_ONCE * (longest // BLOCK + 1)) + 1  # the null block is nobody's
    options = {"num_gpu_blocks_override": blocks, "max_model_len": longest, "kv_cache_memory_bytes": 1 << 30}
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        checkpoint = write_checkpoint("qwen3", Path(folder), **_SHAPE)
        riders = []
        for name, connector in ((PLAIN, None), *connectors.items()):
            riders.append(Rider(name, checkpoint, connector, AT_ONCE, **options))
            stack.callback(riders[-1].close)
        rates = _never_repeating(riders, pairs, draw)
        first_s = _returning(riders, conversations, draw)
    return Measured(rates, first_s, needed / (blocks - 1))


def _never_repeating(riders: Sequence[Rider], pairs: int, draw: random.Random) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = {rider.name: [] for rider in riders}
    for repeat in range(pairs + 1):
        prompts = [_tokens(draw, PROMPT_TOKENS) for _ in range(AT_ONCE)]
        for rider in _in_turns(riders, repeat):
            seconds = rider.serve(prompts, TURN_TOKENS)[1]
            if repeat:  # the first warms up
                rates[rider.name].append(AT_ONCE * (PROMPT_TOKENS + TURN_TOKENS) / seconds)
    return rates


def _returning(riders: Sequence[Rider], conversations: int, draw: random.Random) -> dict[str, list[float]]:
    """Take every conversation's turns, round by round; each turn's prompt goes on from that of the turn before."""
    first_s: dict[str, list[float]] = {rider.name: [] for rider in riders}
    prompts = [_tokens(draw, PROMPT_TOKENS) for _ in range(conversations)]
    for turn in range(TURNS):
        for start in range(0, conversations, AT_ONCE):
            asked = prompts[start : start + AT_ONCE]
            for rider in _in_turns(riders, turn + start // AT_ONCE):
                times = rider.serve(asked, TURN_TOKENS // 4)[0]
                if turn:
                    first_s[rider.name] += times
        prompts = [prompt + _tokens(draw, TURN_TOKENS) for prompt in prompts]
    return first_s


def _in_turns(riders: Sequence[Rider], number: int) -> Sequence[Rider]:
    first = number % len(riders)
    return [*riders[first:], *riders[:first]]


def _tokens(draw: random.Random, count: int) -> list[int]:
    return draw.choices(range(2, _VOCABULARY), k=count)


def method(args: argparse.Namespace) -> str:
    """Return in a sentence how it was measured."""
    return (
        f"{args.pairs} repeats of {AT_ONCE} prompts of {PROMPT_TOKENS} tokens, {args.conversations} conversations of "
        f"{TURNS} turns; engines in turns in one process; medians of the pairs' ratios [95 % interval]"
    )


def _table(told: Mapping[str, object], measured: Measured) -> Iterator[str]:
    yield from heading("Offloading on a stock vLLM", told, f"{PEER}: {told['peer']}")
    names = [name for name in measured.rates if name != PLAIN]
    form = "{:<62}" + "{:>24}" * len(names)
    yield form.format("", *names)
    throughput = [measured.throughput(name).text("{:.3f}") for name in names]
    yield form.format("throughput on prompts that never repeat, over no connector", *throughput)
    sooner = [measured.sooner(name, PLAIN).text("{:.1f}", "x") for name in names]
    turns = len(measured.first_s[PLAIN])
    yield form.format(f"first token of {turns} returning turns, sooner than recomputed", *sooner)
    if PEER in measured.rates:
        beside = measured.sooner(OURS, PEER).text("{:.2f}", "x")
        yield form.format("  sooner than the peer", beside, "")
    yield f"  working set: {measured.kv_to_cache:.1f} times the device's cache"
