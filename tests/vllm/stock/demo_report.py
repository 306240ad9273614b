from __future__ import annotations

import signal
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from kvoffload.cli.demo.play import TurnId
from kvoffload.cli.demo.screen import Screen
from kvoffload.cli.exits import print_error
from tests.vllm.stock.client import Metrics, Reply

_LABEL, _NUMBER = 52, 16
RULE = "-" * (_LABEL + 2 * _NUMBER)
_LIMIT = 1e-3
_SHOWN = (
    "vllm:prefix_cache_hits_total",
    "vllm:external_prefix_cache_queries_total",
    "vllm:external_prefix_cache_hits_total",
)
_SHOWN_MISMATCHES = 5


@dataclass(frozen=True)
class Play:
    """All turns on one server, and the server's metrics before and after them."""

    replies: Mapping[TurnId, Reply]
    before: Metrics
    after: Metrics

    def grown(self, name: str, *labels: str) -> int:
        return self.after(name, *labels) - self.before(name, *labels)

    @property
    def prompt_tokens(self) -> int:
        return sum(reply.prompt_tokens for reply in self.replies.values())

    @property
    def cached_tokens(self) -> int:
        return sum(reply.cached_tokens for reply in self.replies.values())

    @property
    def host_tokens(self) -> int:
        """The number of prompt tokens that vLLM reports as loaded from the host."""
        return self.grown("vllm:external_prefix_cache_hits_total")

    def first_tokens_s(self, *, returning: bool) -> list[float]:
        """Return the times to first token of later turns, or of the conversations' first turns."""
        return [reply.first_token_s for turn, reply in self.replies.items() if (turn.turn > 0) == returning]


def holds(without: Play, with_it: Play) -> bool:
    """Return whether all answers are equal and some tokens came from the host."""
    return not _mismatches(without, with_it) and with_it.host_tokens > 0


def render(head: str, device_blocks: int, without: Play, with_it: Play) -> str:
    lines = [
        head,
        f"KV cache on the device: {device_blocks} blocks; random weights, no two conversations alike",
        "",
        *_compared(without, with_it),
        "",
        *_offloading(with_it),
        "",
        "from the server's /metrics: what is not 0, buckets aside, one request for warming up included",
        *_metrics(with_it.after),
        "",
        *_verdict(without, with_it),
    ]
    return "\n".join(lines)


def _compared(without: Play, with_it: Play) -> Iterator[str]:
    plays = without, with_it
    yield row("", "without", "with")
    yield RULE
    yield row("prompt tokens", *(f"{play.prompt_tokens:,}" for play in plays))
    yield row("prompt tokens computed", *(f"{play.prompt_tokens - play.cached_tokens:,}" for play in plays))
    yield row(
        "prompt tokens found on the device", *(f"{play.cached_tokens - play.host_tokens:,}" for play in plays)
    )
    yield row("prompt tokens found on the host", *(f"{play.host_tokens:,}" for play in plays))
    for label, returning in (("first turns", False), ("returning turns", True)):
        times = [play.first_tokens_s(returning=returning) for play in plays]
        yield row(f"time to first token, {label}, p50 / max", *map(times_ms, times))
    slow, fast = (statistics.median(play.first_tokens_s(returning=True)) for play in plays)
    yield row("  median of returning turns, times lower", "", f"{slow / fast:.1f}x")


def _offloading(play: Play) -> Iterator[str]:
    saved = play.host_tokens
    hit, missed = (play.grown("kvoffload_lookup_blocks_total", result) for result in ("hit", "miss"))
    yield f"hits      {hit:,} of {hit + missed:,} block positions that were looked up on the host"
    yield f"saved     {saved:,} tokens were not computed again, {saved / play.prompt_tokens:.0%} of all prompts"
    stored, loaded = (play.grown("kvoffload_transfer_bytes_total", way) / 2**20 for way in ("store", "load"))
    yield f"moved     {stored:.1f} MiB to the host, {loaded:.1f} MiB back"


def _metrics(metrics: Metrics) -> Iterator[str]:
    for key, value in metrics.series.items():
        ours = key[0].startswith("kvoffload_") and not key[0].endswith(("_bucket", "_created"))
        if value and (ours or key[0] in _SHOWN):
            yield f"  {metrics.written[key]} {round(value, 4):.12g}"


def _verdict(without: Play, with_it: Play) -> Iterator[str]:
    different = _mismatches(without, with_it)
    tokens = sum(len(reply.tokens) for reply in with_it.replies.values())
    worst = max(
        abs(one - two)
        for turn, reply in without.replies.items()
        for one, two in zip(reply.logprobs, with_it.replies[turn].logprobs, strict=False)
    )
    closely = f"log-probabilities differ by at most {worst:.1e} (allowed: {_LIMIT:.0e})"
    if not different:
        yield f"outputs   all {tokens:,} tokens of {len(with_it.replies)} turns agree; {closely}"
    else:
        yield f"outputs   DIFFER in {len(different)} of {len(with_it.replies)} turns; {closely}"
        for turn in different[:_SHOWN_MISMATCHES]:
            yield f"          conversation {turn.conversation}, turn {turn.turn}"
    if not with_it.host_tokens:
        yield "hits      NONE: nothing was found on the host"


def _mismatches(without: Play, with_it: Play) -> list[TurnId]:
    pairs = without.replies.items()
    return [turn for turn, reply in pairs if not reply.agrees_with(with_it.replies[turn], _LIMIT)]


def perform(run: Callable[[Path, Screen], int], *, show_log: bool) -> int:
    """Run a demo in a scratch folder; return its exit status: 130 after Ctrl-C or SIGTERM, 1 if a server failed."""
    signal.signal(signal.SIGTERM, _interrupt)
    screen = Screen()
    with tempfile.TemporaryDirectory(prefix="kvoffload-demo-") as scratch:
        try:
            return run(Path(scratch), screen)
        except KeyboardInterrupt:
            screen.say("interrupted; the server has ended")
            return 130
        except (OSError, TimeoutError) as error:
            screen.say(f"the server could not continue: {error}")
            return 1
        finally:
            for log in sorted(Path(scratch).glob("*.log")) if show_log else ():
                print_error(log.read_text())


def _interrupt(signum: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def row(label: str, one: str, other: str) -> str:
    return f"{label:<{_LABEL}}{one:>{_NUMBER}}{other:>{_NUMBER}}"


def times_ms(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds) * 1000:,.0f}/{max(seconds) * 1000:,.0f} ms"
