"""Sends the same prompts before and after a SIGKILL of a stock SGLang, without and with kvoffload's disk.

    python tests/sglang/stock/demo.py [--prompts 6] [--show-log]

Run this demo in an environment with SGLang (`make sglang-demo` creates one in `.venv/sglang`). The model is small with
random weights, so its answers are meaningless, but they depend on every page of the KV cache. The server runs on the
CPU.

Exit status: 0; 1 if an answer differs, nothing was found on the disk or a server ended; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from kvoffload.checks.options import positive
from kvoffload.cli.demo.screen import Screen
from tests.sglang.stock.engines import PAGE, Answer, Server, serving, wait_until
from tests.vllm.stock import checkpoints
from tests.vllm.stock.demo_report import RULE, perform, row, times_ms

PROMPT_TOKENS, ANSWER_TOKENS = 96 * PAGE + 9, 16
PROMPT_BYTES = 96 * PAGE * 2 * 4 * 8 * 64 * 4
"""Bytes of a prompt's whole pages: tokens, keys and values, layers, heads, the size of a head, bytes of float32."""
# The device holds one prompt and the host two, so SGLang writes all others to the disk.
OPTIONS: Mapping[str, Any] = {
    "max_total_tokens": 2048,
    "context_length": 2048,
    "chunked_prefill_size": 2048,
    "max_running_requests": 2,
}


def draw_prompts(count: int) -> list[list[int]]:
    draw = random.Random(0)
    return [draw.choices(range(256), k=PROMPT_TOKENS) for _ in range(count)]


def warm_up(server: Server, *, has_tiers: bool) -> None:
    """Serve a prompt that is not sent again. If the server has our tiers, wait until the disk is open."""
    server.generate(range(2 * PAGE), 2)
    if has_tiers:
        wait_until(lambda: server.metric("kvoffload_tier_state", tier="disk", state="open") == 1)


def live(
    model: Path, log: Path, prompts: Sequence[Sequence[int]], disk: Path | None, screen: Screen
) -> list[Answer]:
    """Start a server, serve the prompts one after the other, and kill the server."""
    storage = (
        None if disk is None else {"disk_path": str(disk), "disk_bytes": 2 * len(prompts) * PROMPT_BYTES}
    )
    screen.say(f"starting SGLang {'without' if disk is None else 'with'} kvoffload")
    with serving(model, log, storage=storage, **OPTIONS) as server:
        warm_up(server, has_tiers=disk is not None)
        answers = [server.generate(prompt, ANSWER_TOKENS) for prompt in prompts]
        server.flush()  # SGLang answers when all pages are written.
        server.kill()
        return answers


def run(count: int, folder: Path, screen: Screen) -> int:
    """Run two servers in turn without kvoffload and two with it, and print the report; return the exit status."""
    transformers_logging.disable_progress_bar()
    model = checkpoints.make("qwen3", folder / "model", **checkpoints.LARGER)
    prompts = draw_prompts(count)
    without, with_it = (
        [live(model, folder / "server.log", prompts, disk, screen) for _ in range(2)]
        for disk in (None, folder / "disk")
    )
    screen.result("\n".join(report(without, with_it)))
    tokens = [answer.tokens for answer in without[0]]
    is_equal = all([each.tokens for each in life] == tokens for life in (*without, *with_it))
    return 0 if is_equal and found(with_it[1]) else 1


def found(answers: Sequence[Answer]) -> int:
    return sum(answer.stored for answer in answers)


def report(without: Sequence[Sequence[Answer]], with_it: Sequence[Sequence[Answer]]) -> list[str]:
    """Return the lines of the report. Each argument has the answers of the first server and of the second."""
    both = without, with_it
    count = len(without[0])
    first, again = ([[answer.first_s for answer in lives[number]] for lives in both] for number in (0, 1))
    slow, fast = map(statistics.median, again)
    different = sum(
        len({life[number].tokens for lives in both for life in lives}) > 1 for number in range(count)
    )
    tokens = sum(len(answer.tokens) for lives in both for life in lives for answer in life)
    outputs = f"DIFFER for {different} of {count} prompts" if different else f"all {tokens} tokens agree"
    return [
        f"{count} prompts of {PROMPT_TOKENS:,} tokens, SIGKILL, a new start, the same prompts; qwen3, CPU",
        "",
        row("", "without", "with"),
        RULE,
        row("prompt tokens after the new start", *[f"{count * PROMPT_TOKENS:,}"] * 2),
        row("  found on the disk", *(f"{found(lives[1]):,}" for lives in both)),
        row("time to first token before, p50 / max", *map(times_ms, first)),
        row("time to first token after the new start, p50 / max", *map(times_ms, again)),
        row("  median, times lower", "", f"{slow / fast:.1f}x"),
        "",
        f"outputs   {outputs}",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="a stock SGLang, killed and started again, without and with")
    parser.add_argument("--prompts", type=positive, default=6)
    parser.add_argument("--show-log", action="store_true", help="print the servers' log at the end")
    asked = parser.parse_args()
    return perform(partial(run, asked.prompts), show_log=asked.show_log)


if __name__ == "__main__":
    sys.exit(main())
