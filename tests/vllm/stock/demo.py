"""Runs the same conversations on a stock `vllm serve` without and with kvoffload, through the OpenAI API.

    python tests/vllm/stock/demo.py [--model gemma3] [--conversations 8] [--turns 4] [--host-path DIR] [--show-log]

Run this demo in an environment with vLLM and kvoffload (`make vllm-demo` creates one in `.venv/vllm`). The
model is small and has random weights, so its answers are meaningless, but they depend on every block of the
KV cache. If the environment's torch has a GPU, the server uses the GPU.

With --host-path, a server with kvoffload serves the conversations before, and is killed (SIGKILL). The table then
compares a server without kvoffload with one that finds what the killed one had.

Exit status: 0; 1 if an answer differs or nothing was found on the host; 130 after Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

if torch.cuda.is_available():
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cuda")  # otherwise the import of `engines` sets "cpu"

from kvoffload.cli.demo.options import DemoOptions
from kvoffload.cli.demo.play import Conversation, TurnId, make_conversations, prompt_of
from kvoffload.cli.demo.results import played
from kvoffload.cli.demo.screen import Screen
from tests.vllm.stock import checkpoints, client, demo_report, engines
from tests.vllm.stock.demo_report import Play

CONNECTOR: dict[str, Any] = {
    "kv_connector": "KVOffloadConnector",  # vLLM finds this name through the wheel's entry point
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"host_bytes": "64MiB"},
}
FIRST_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 640, 64, 16
_LATER = engines.OPTIONS["max_model_len"] - FIRST_TOKENS - ANSWER_TOKENS  # the tokens of all later turns
MOST_TURNS = 1 + _LATER // (TURN_TOKENS + ANSWER_TOKENS)
AT_ONCE = 2  # how many conversations run concurrently
DEVICE_BLOCKS = {"qwen3": 64, "gemma3": 112}  # eight conversations need at least three times as many blocks


@dataclass(frozen=True)
class Scene:
    kind: checkpoints.Kind
    conversations: Sequence[Conversation]
    checkpoint: Path
    logs: Path


def make_scene(asked: argparse.Namespace, folder: Path) -> Scene:
    options = DemoOptions(
        conversations=asked.conversations,
        turns=asked.turns,
        first_tokens=FIRST_TOKENS,
        turn_tokens=TURN_TOKENS,
        answer_tokens=ANSWER_TOKENS,
    )
    transformers_logging.disable_progress_bar()
    checkpoint = checkpoints.make(asked.model, folder / asked.model)
    return Scene(asked.model, make_conversations(options), checkpoint, folder)


def play(
    scene: Scene, name: str, screen: Screen, script: Play | None, *, kills: bool = False, **options: Any
) -> Play:
    """Start a server, run every turn of every conversation, and stop the server, or kill it.

    Prompts contain earlier answers. If `script` is given, the answers of that run are used, so that both runs
    have the same prompts.
    """
    screen.say(f"starting `vllm serve` {name} kvoffload")
    begun = time.monotonic()
    with engines.serving(
        scene.checkpoint,
        scene.logs / f"{name}.log",
        num_gpu_blocks_override=DEVICE_BLOCKS[scene.kind],
        enable_prompt_tokens_details=True,
        **options,
    ) as server:
        screen.say(f"ready after {time.monotonic() - begun:.0f} s; the conversations begin")
        client.stream(server, range(FIRST_TOKENS // 2), ANSWER_TOKENS)  # a warm-up
        before = client.settled(server)
        replies = _take_turns(server, scene.conversations, screen, script)
        played = Play(replies, before, client.settled(server))
        if kills:
            server.kill()
        return played


def _take_turns(
    server: engines.Server, conversations: Sequence[Conversation], screen: Screen, script: Play | None
) -> dict[TurnId, client.Reply]:
    replies: dict[TurnId, client.Reply] = {}
    said = script.replies if script is not None else replies

    def take(turn: TurnId) -> None:
        answers = [said[TurnId(turn.conversation, earlier)].tokens for earlier in range(turn.turn)]
        prompt = prompt_of(conversations[turn.conversation], answers)
        replies[turn] = client.stream(server, prompt, ANSWER_TOKENS)
        screen.progress(f"{len(replies)} turns taken")

    turns = len(conversations[0])
    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            for number in range(turns):
                list(pool.map(take, [TurnId(each, number) for each in range(len(conversations))]))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return replies


def run(asked: argparse.Namespace, folder: Path, screen: Screen) -> int:
    """Run the conversations without and with kvoffload, and print the report. Return the exit status."""
    scene = make_scene(asked, folder)
    without = play(scene, "without", screen, None)
    connector = CONNECTOR
    if asked.host_path is not None:
        settings = {**CONNECTOR["kv_connector_extra_config"], "host_path": str(asked.host_path)}
        connector = {**CONNECTOR, "kv_connector_extra_config": settings}
        play(scene, "before the kill, with", screen, without, kills=True, kv_transfer_config=connector)
    with_it = play(scene, "with", screen, without, kv_transfer_config=connector)
    device = "GPU" if torch.cuda.is_available() else "CPU"
    life = "" if asked.host_path is None else "; with: after a SIGKILL"
    head = f"{played(asked.conversations, asked.turns)}, {asked.model}, {device}{life}"
    screen.result(demo_report.render(head, DEVICE_BLOCKS[asked.model], without, with_it))
    return 0 if demo_report.holds(without, with_it) else 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description="conversations with `vllm serve`, without and with kvoffload"
    )
    parser.add_argument(
        "--model", choices=checkpoints.KINDS, default="qwen3", help="full attention, or windows"
    )
    parser.add_argument("--conversations", type=_within(4, 64), default=8)
    parser.add_argument("--turns", type=_within(2, MOST_TURNS), default=4)
    parser.add_argument("--host-path", metavar="DIR", type=Path, help="on a tmpfs; kill the server once")
    parser.add_argument("--show-log", action="store_true", help="print the servers' logs at the end")
    asked = parser.parse_args()
    return demo_report.perform(partial(run, asked), show_log=asked.show_log)


def _within(least: int, most: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"from {least} to {most}")
        return int(text)

    return number


if __name__ == "__main__":
    sys.exit(main())
