"""What can happen to a local store: each begins when it is called, and returns what ends it."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping
from typing import TypeAlias

from kvoffload.cli.exits import CommandError
from kvoffload.remote.local import LocalBucket, LocalMooncake, Server
from kvoffload.remote.mooncake_child import load_client

LocalStore: TypeAlias = LocalMooncake | LocalBucket
End: TypeAlias = Callable[[], None]
Begin: TypeAlias = Callable[[LocalStore], End]

_RUNS_S, _RESTS_S = 0.01, 0.19  # of a store that is slow
_FILLING = 2**20  # bytes of a foreign value


def _kill_node(server: LocalStore) -> End:
    assert isinstance(server, LocalMooncake)
    server.node.kill()
    return server.start_node


def _kill_master(server: LocalStore) -> End:
    assert isinstance(server, LocalMooncake)
    server.master.kill()
    return server.start_master


def _hang(server: LocalStore) -> End:
    process = _data_server(server)
    process.stop()
    return process.go_on


def _slow_down(server: LocalStore) -> End:
    """Let the process that has the values run for a twentieth of the time."""
    process, is_over = _data_server(server), threading.Event()

    def stutter() -> None:
        while not is_over.wait(_RUNS_S):
            process.stop()
            is_over.wait(_RESTS_S)
            process.go_on()

    thread = threading.Thread(target=stutter)
    thread.start()

    def end() -> None:
        is_over.set()
        thread.join()

    return end


def _fill(server: LocalStore) -> End:
    """Have another client put values all the time, so that the store must evict or refuse."""
    assert isinstance(server, LocalMooncake)
    client, is_over = load_client().MooncakeDistributedStore(), threading.Event()
    if client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 2**26, "tcp", "", f"127.0.0.1:{server.port}"):
        raise CommandError("the Mooncake master refuses another client")
    value = secrets.token_bytes(_FILLING)

    def fill() -> None:
        while not is_over.is_set():
            client.put(secrets.token_hex(8), value)

    thread = threading.Thread(target=fill)
    thread.start()

    def end() -> None:
        is_over.set()
        thread.join()
        client.close()

    return end


def _data_server(server: LocalStore) -> Server:
    return server.node if isinstance(server, LocalMooncake) else server.server


FAILURES: Mapping[str, Mapping[str, Begin]] = {
    "mooncake": {
        "node killed": _kill_node,
        "master killed": _kill_master,
        "node hangs": _hang,
        "node slow": _slow_down,
        "full": _fill,
    },
    "s3": {"hangs": _hang, "slow": _slow_down},
}
"""By kind of store."""
