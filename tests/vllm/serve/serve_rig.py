"""Runs a `vllm serve` with the connector, sends requests, and checks the log and what the server leaves behind."""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engine_rig import transfer_config
from tests.vllm.stock import client, engines
from tests.vllm.stock.client import Reply

MARKS = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]

BLOCK = engines.BLOCK
_PATIENCE_S = 120.0
# Send this many requests in a burst, and at most this many bursts.
_BURST, _BURSTS = 16, 20

Prompt = tuple[int, ...]

_OUR_FRAME = re.compile(r'File ".*/(kvoffload_vllm|kvoffload/(bus|core|model|runtime|telemetry|transfer))/')
_OUR_WORDS = ("core_raised", "offloading_off", "worker_not_closed", "coroutine_lost")


def connector(host_blocks: int = 512, **extra: object) -> dict[str, Any]:
    """Return the connector's settings as operators write them. vLLM finds the connector by its entry point."""
    config = transfer_config(host_blocks, **extra)
    del config["kv_connector_module_path"]
    return config


def draw(seed: int, count: int, length: int) -> list[Prompt]:
    """Return random prompts without common prefixes."""
    random_ = random.Random(seed)
    return [tuple(random_.randrange(256) for _ in range(length)) for _ in range(count)]


def draw_families(seed: int) -> list[Prompt]:
    """Return random prompts of several lengths. Their common prefixes may end in the middle of a block."""
    stems = draw(seed, 3, 420)
    tails = draw(seed + 1, 12, 90)
    kept = (420, 256, 100, 64)
    return [stems[at % 3][: kept[at % 4]] + tail[: 20 + 6 * at] for at, tail in enumerate(tails)]


def ask(
    server: engines.Server,
    prompts: Sequence[Prompt],
    count: int = 8,
    *,
    at_once: int = 4,
    salted: bool = False,
) -> list[Reply]:
    """Send the prompts, up to `at_once` concurrently; return the replies.

    With `salted`, each prompt has a different salt, so that it finds no block.
    """

    def one(at: int) -> Reply:
        return client.stream(server, prompts[at], count, salt=f"of prompt {at}" if salted else None)

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(one, range(len(prompts))))


def check_same(replies: Sequence[Reply], expected: Sequence[Reply | engines.Answer]) -> None:
    pairs = zip(replies, expected, strict=True)
    different = [at for at, (reply, right) in enumerate(pairs) if not reply.agrees_with(right)]
    assert not different, [(replies[at], expected[at]) for at in different]


def until(condition: Callable[[], bool], seconds: float = _PATIENCE_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.01)


@contextmanager
def burst(server: engines.Server, tokens: int = 4) -> Iterator[list[Future[Reply]]]:
    """Send prompts, and yield the futures of their replies while the engine has all prompts and a copy is open.

    Each reply has this many tokens. All prompts arrive before the caller stops the server, because vLLM does not
    answer requests that arrive during its shutdown.
    """
    with ThreadPoolExecutor(_BURST) as pool:
        for attempt in range(_BURSTS):
            prompts = draw(100 + attempt, _BURST, 900)
            replies = [pool.submit(client.stream, server, prompt, tokens) for prompt in prompts]
            while (ended := sum(reply.done() for reply in replies)) < _BURST:
                known = sum(map(server.metric, ("vllm:num_requests_running", "vllm:num_requests_waiting")))
                if ended + known >= _BURST and server.metric("kvoffload_open_jobs") > 0:
                    yield replies
                    return
    raise AssertionError("no copy was ever seen to be open")


def processes(server: engines.Server) -> dict[int, str]:
    """Return the running processes of the server's session: their command lines, by process id."""
    entries = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return {int(entry.name): name for entry in entries if (name := _member(entry, server.process.pid))}


def shared_memory(server: engines.Server) -> set[Path]:
    """Return the files in shared memory that the server's processes have mapped."""
    found: set[Path] = set()
    for process in processes(server):
        words = [line.split() for line in Path(f"/proc/{process}/maps").read_text().splitlines()]
        found.update(Path(line[5]) for line in words if len(line) > 5 and line[5].startswith("/dev/shm/"))
    return {path for path in found if path.exists()}


def check_nothing_is_left(server: engines.Server, shared: set[Path]) -> None:
    """Check that no process of the server's session is running, and that the server's shared memory is gone."""
    until(lambda: not processes(server), 30)
    until(lambda: not any(path.exists() for path in shared), 30)


def check_log(server: engines.Server) -> None:
    """Check that the log has no error of kvoffload and no traceback through kvoffload's code."""
    log = server.log.read_text()
    assert not _OUR_FRAME.search(log), log[-8000:]
    assert not [word for word in _OUR_WORDS if word in log], log[-8000:]


def _member(entry: Path, session: int) -> str | None:
    try:
        # A line has the form "pid (name) state parent group session". The name may contain any characters.
        name, _, rest = entry.joinpath("stat").read_text().partition(" (")[2].rpartition(") ")
        state, _, _, leader = rest.split()[:4]
        title = entry.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except (OSError, ValueError):
        return None
    return (title or name) if int(leader) == session and state != "Z" and os.getpid() != session else None
