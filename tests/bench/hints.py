"""Counts how many prompt tokens are found when clients say which sessions have ended, rightly or wrongly, with the real core.

Without a trace, agents' sessions are drawn. Of a trace, prompts that continue each other are a session, and its last
prompt is known with hindsight, which real clients have only in part.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, islice, product
from pathlib import Path

from kvoffload.model.ids import BlockKey
from tests.bench.lines import Line
from tests.bench.policies import Engine
from tests.bench.results import add_output_arguments, give_out
from tests.bench.trace_file import GROUP, Prompt, Trace, read_trace
from tests.bench.workloads import live_blocks
from tests.keys import block_key

HOSTS = (0.5, 1.0, 2.0)
_DEVICE = 0.1
_SHARED_BLOCKS = 2  # prompts of a trace that have only these blocks in common are of different sessions
_LIAR = 2  # every second session belongs to clients that are wrong

Claim = Callable[[Prompt, int], Prompt]
CLAIMS: Mapping[str, Claim] = {
    "none": lambda prompt, _: prompt._replace(session=0, is_last_turn=False),
    "all sessions": lambda prompt, _: prompt,
    "30 % of sessions": lambda prompt, _: prompt._replace(
        is_last_turn=prompt.is_last_turn and prompt.session % 10 < 3
    ),
    "last turns without sessions": lambda prompt, number: prompt._replace(
        session=number if prompt.is_last_turn else 0
    ),
    "all turns are last": lambda prompt, _: prompt._replace(is_last_turn=True),
    "all turns are sessions": lambda prompt, number: prompt._replace(session=number, is_last_turn=True),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, metavar="FILE", help="JSON lines (default: drawn sessions)")
    parser.add_argument("--sessions", type=int, default=300, help="drawn sessions (default 300)")
    parser.add_argument(
        "--hosts", type=float, nargs="+", default=list(HOSTS), metavar="TIMES", help="in live sets"
    )
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    trace = draw_sessions(args.sessions) if args.trace is None else with_sessions(read_trace(args.trace))
    method = (
        f"the real core; device of {_DEVICE:g} live sets; share of prompt tokens that device and host have"
    )
    return give_out("hints", args, method, _measure(trace, args.hosts))


def _measure(trace: Trace, hosts: Sequence[float]) -> Iterator[Line]:
    for host, (name, claim) in product(hosts, CLAIMS.items()):
        yield Line(f"host {host:g}, {name}", 100 * replay(trace, host, claim), unit=" %")
        if claim is CLAIMS["all turns are last"]:
            for who, only in (("none", CLAIMS["none"]), ("half of them wrong", half_wrong)):
                found = 100 * replay(trace, host, only, lambda prompt: prompt.session % _LIAR == 0)
                yield Line(f"host {host:g}, honest half, {who}", found, unit=" %")


def half_wrong(prompt: Prompt, _: int) -> Prompt:
    """Say of every second session that each of its turns is its last, and nothing of the others."""
    return prompt._replace(is_last_turn=prompt.session % _LIAR == 1)


def replay(
    trace: Trace, host: float, claim: Claim, counts: Callable[[Prompt], bool] = lambda _: True
) -> float:
    """Return which share of the prompt tokens that count an engine finds, if clients claim this."""
    live = live_blocks(trace.prompts)
    longest = max(len(prompt.keys) for prompt in trace.prompts) + 1
    engine = Engine(
        "eager", max(int(_DEVICE * live), longest + 8), max(int(host * live), 1), trace.block_tokens
    )
    found = tokens = 0
    for number, prompt in enumerate(trace.prompts, 1):
        before = engine.count["found"]
        engine.serve(claim(prompt, number))
        if counts(prompt):
            found += engine.count["found"] - before
            tokens += prompt.tokens
    return found / tokens


def with_sessions(trace: Trace) -> Trace:
    """Let prompts of a trace be turns of one session if one has a block of the other beyond the shared first ones."""
    sessions: dict[BlockKey, int] = {}
    prompts: list[Prompt] = []
    for number, prompt in enumerate(trace.prompts, 1):
        own = prompt.keys[_SHARED_BLOCKS:]
        session = next((sessions[key] for key in reversed(own) if key in sessions), number)
        sessions.update(dict.fromkeys(own, session))
        prompts.append(prompt._replace(session=session))
    return Trace(trace.block_tokens, _with_ends(prompts))


def _with_ends(prompts: Sequence[Prompt]) -> list[Prompt]:
    last = {prompt.session: number for number, prompt in enumerate(prompts)}
    return [
        prompt._replace(is_last_turn=last[prompt.session] == number) for number, prompt in enumerate(prompts)
    ]


# The figures are those of NVIDIA AIPerf's generator of coding agents' sessions, configuration `inference-day-2026`:
# https://github.com/ai-dynamo/aiperf, src/aiperf/dataset/agentic_code_gen. Each pair is the mean and the median of a
# log-normal distribution. Its sessions have 11.6 turns on average and begin with 47,000 tokens (median).
_BLOCK_TOKENS, _MOST_TOKENS = 512, 200_000
_SYSTEM_TOKENS, _GROUP_TOKENS, _GROUPS, _GROUP_SKEW = 32_000, 10_000, 100, 0.6
_START, _MOST_START = (15_000, 5_000), 50_000
_NEW, _MOST_NEW = (6_000, 4_000), 50_000
_ANSWER, _MOST_ANSWER = (1_000, 800), 10_000
_TOOL_S, _HUMAN_S, _TOOL_SHARE = (5, 2), (30, 15), 0.7
_END, _END_GROWTH = 0.05, 0.5
_DECODE, _PREFILL = 60, 20_000  # tokens/s, which that generator assumes
_ACTIVE = 40  # sessions at a time, our choice


def draw_sessions(sessions: int, seed: int = 1) -> Trace:
    """Return the prompts of agents' sessions: each has all turns before it, answers included."""
    draw = random.Random(seed)
    fresh = (block_key(b"%032x" % number, GROUP) for number in count())

    def keys(number: int) -> tuple[BlockKey, ...]:
        return tuple(islice(fresh, max(number, 0)))

    system = keys(_SYSTEM_TOKENS // _BLOCK_TOKENS)
    groups = [system + keys(_GROUP_TOKENS // _BLOCK_TOKENS) for _ in range(_GROUPS)]
    weights = [(place + 1) ** -_GROUP_SKEW for place in range(_GROUPS)]
    drawn: list[list[tuple[float, int, tuple[BlockKey, ...]]]] = []
    for _ in range(sessions):
        turns, body = [], draw.choices(groups, weights)[0]
        for at_s, tokens in _turns(draw, len(body) * _BLOCK_TOKENS):
            body += keys(tokens // _BLOCK_TOKENS - len(body))
            turns.append((at_s, tokens, body))
        drawn.append(turns)
    every_s = sum(turns[-1][0] for turns in drawn) / sessions / _ACTIVE
    prompts, start_s = list[Prompt](), 0.0
    for session, turns in enumerate(drawn, 1):
        start_s += draw.expovariate(1 / every_s)
        prompts += [Prompt(start_s + at_s, tokens, body, session) for at_s, tokens, body in turns]
    return Trace(_BLOCK_TOKENS, _with_ends(sorted(prompts)))


def _turns(draw: random.Random, shared: int) -> Iterator[tuple[float, int]]:
    """Yield the time since the session's start and the prompt's tokens of each turn."""
    at_s, tokens = 0.0, shared + int(min(_log_normal(draw, _START), _MOST_START))
    while True:
        yield at_s, tokens
        answer = int(min(_log_normal(draw, _ANSWER), _MOST_ANSWER))
        new = int(min(_log_normal(draw, _NEW), _MOST_NEW))
        if tokens + answer + new >= _MOST_TOKENS:
            return
        if draw.random() < _END * (1 + _END_GROWTH * tokens / _MOST_TOKENS):
            return
        pause = _TOOL_S if draw.random() < _TOOL_SHARE else _HUMAN_S
        at_s += answer / _DECODE + new / _PREFILL + _log_normal(draw, pause)
        tokens += answer + new


def _log_normal(draw: random.Random, mean_and_median: tuple[float, float]) -> float:
    mean, median = mean_and_median
    return draw.lognormvariate(math.log(median), math.sqrt(2 * math.log(mean / median)))
