from __future__ import annotations

import subprocess
import sys

import pytest

from tests.remote.servers import Bucket

IN_CALLS = """
import secrets, sys, time
from kvoffload.model.ids import BlockKey
from kvoffload.remote.address import parse_address
from kvoffload.remote.store import open_store
from kvoffload.remote.values import Shard
from kvoffload.runtime.portal import DaemonExecutor
from kvoffload.transfer.remote import remote_calls

store = open_store(parse_address(sys.argv[1]), 10.0)
shard, key = Shard(f"exit/{secrets.token_hex(16)}", 0, 1), BlockKey(b"key")
store.put(shard, [key], [memoryview(bytes(4096))])
calls = remote_calls(lambda: store, DaemonExecutor("calls", 16), time.monotonic, 10.0)
while not calls.works:
    calls.poll()
answers = []
for _ in range(20_000):
    read = lambda _, store: store.get(shard, [key], [memoryview(bytearray(4096))])
    calls.submit(read, lambda call: answers.append(call.result))
while not answers:
    calls.poll()
if sys.argv[2] == "closed":
    calls.close()
"""

SLOW_TO_LEAVE = """
import asyncio, threading, time

real = asyncio.SelectorEventLoop.call_soon_threadsafe
def wake(*arguments, **options):
    handle = real(*arguments, **options)
    if threading.get_ident() not in [thread.ident for thread in threading.enumerate()]:
        time.sleep(0.05)  # the client's thread has woken the loop, and is not back yet
    return handle
asyncio.SelectorEventLoop.call_soon_threadsafe = wake
"""


@pytest.mark.parametrize("client", ["", SLOW_TO_LEAVE], ids=["", "slow"])
@pytest.mark.parametrize("how", ["closed", "open"])
def test_a_process_that_ends_during_calls_exits_normally(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, how: str, client: str
) -> None:
    bucket.reach(monkeypatch)
    for _ in range(4):
        command = [sys.executable, "-c", client + IN_CALLS, bucket.url, how]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
