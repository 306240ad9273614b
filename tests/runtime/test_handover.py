"""Open files pass between the processes of an engine."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from uuid import uuid4

import pytest

from kvoffload.model.errors import HostMemoryError
from kvoffload.runtime import handover
from kvoffload.runtime.handover import Offer, ask
from tests.captured_logs import capture_logs

PATIENCE_S = 30


@pytest.fixture
def name() -> str:
    return uuid4().hex


def memory(text: bytes) -> int:
    descriptor = os.memfd_create("test")
    os.write(descriptor, text)
    return descriptor


def test_another_process_writes_to_the_files_that_are_passed_to_it(name: str) -> None:
    files = [memory(b"one"), memory(b"two")]
    offer = Offer(name, b"about them", files, 2)
    program = (
        "import os, sys; from kvoffload.runtime.handover import ask; text, files = ask(sys.argv[1], 30); "
        "print(text.decode(), *[os.pread(each, 9, 0).decode() for each in files]); os.pwrite(files[1], b'new', 0)"
    )
    for expected in ("about them one two", "about them one new"):
        found = subprocess.run(
            [sys.executable, "-c", program, name],
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE_S,
        )
        assert found.stdout.strip() == expected
    assert os.pread(files[1], 9, 0) == b"new"
    offer.close()
    for descriptor in files:
        os.close(descriptor)


def test_who_asks_waits_for_the_offer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor = memory(b"one")
    offers = []
    monkeypatch.setattr(
        "kvoffload.runtime.handover.time.sleep", lambda _: offers.append(Offer(name, b"now", [descriptor], 1))
    )
    text, files = ask(name, PATIENCE_S)
    assert (text, os.pread(files[0], 9, 0)) == (b"now", b"one")
    offers[0].close()
    for each in (descriptor, *files):
        os.close(each)


def test_programs_that_a_process_starts_do_not_inherit_files_that_were_passed_to_it(name: str) -> None:
    descriptor = memory(b"one")
    offer = Offer(name, b"text", [descriptor], 1)
    _, files = ask(name, PATIENCE_S)
    assert [os.get_inheritable(each) for each in files] == [False]
    offer.close()
    for each in (descriptor, *files):
        os.close(each)


def test_who_gets_only_some_of_the_files_keeps_none_of_them(name: str) -> None:
    descriptor = memory(b"one")
    offer = Offer(name, b"text", [descriptor] * 9, 1)  # one more than a process asks for
    before = os.listdir("/proc/self/fd")
    with pytest.raises(HostMemoryError, match="may not open so many files"):
        ask(name, PATIENCE_S)
    offer.close()
    assert len(os.listdir("/proc/self/fd")) < len(before)  # without the offer's socket
    os.close(descriptor)


def test_an_offer_that_ends_leaves_its_name_to_others(name: str) -> None:
    for _ in range(2):
        Offer(name, b"", [], 3).close()
    with pytest.raises(HostMemoryError, match="nothing was offered for 0 s"):
        ask(name, 0)


def test_who_can_pass_nothing_more_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def accept(_: socket.socket) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with capture_logs() as logged:
        monkeypatch.setattr(socket.socket, "accept", accept)
        offer = Offer(name, b"", [], 2)
        offer._thread.join(PATIENCE_S)
        offer.close()
    (line,) = [line for line in logged if line["event"] == "host_memory_not_offered"]
    assert (line["reason"], line["ranks_without"]) == ("[Errno 24] Too many open files", 2)


def test_a_name_is_offered_once(name: str) -> None:
    offer = Offer(name, b"", [], 1)
    with pytest.raises(OSError, match="in use"):
        Offer(name, b"", [], 1)
    offer.close()


def test_nothing_passes_between_users(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor = memory(b"one")
    offer = Offer(name, b"text", [descriptor], 1)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(HostMemoryError, match="a process of another user offers it"):
        ask(name, PATIENCE_S)
    monkeypatch.setattr(handover, "_is_same_user", lambda other: other.getsockname() == "")
    with pytest.raises(HostMemoryError, match="has ended"):
        ask(name, PATIENCE_S)
    offer.close()
    os.close(descriptor)
