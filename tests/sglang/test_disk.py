from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

from tests.sglang.prompts import PATIENT, STATE, Prompts, attached
from tests.sglang.stock.engines import PAGE, Server, wait_until

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]


Attach = Callable[..., AbstractContextManager[None]]


@pytest.fixture
def disk(server: Server, tmp_path: Path) -> Attach:
    """Return a function that attaches our backend with its disk in `tmp_path`."""
    return partial(attached, server, **PATIENT, disk_path=str(tmp_path))


def test_evicted_pages_are_read_from_the_disk_and_tokens_stay_the_same(
    server: Server, some: Prompts, disk: Attach
) -> None:
    with disk():
        assert some.ask(server) == some.none
        server.flush()
        assert some.ask(server) == some.all
    written = server.metric("kvoffload_tier_blocks_total", tier="disk", direction="store", outcome="done")
    assert written == sum(some.all) / PAGE


def test_the_next_backend_finds_the_written_pages_unless_its_weights_differ(
    server: Server, some: Prompts, disk: Attach
) -> None:
    with disk():
        some.ask(server)
    with disk(weights_id="other weights"):
        assert some.ask(server) == some.none
    with disk():
        assert some.ask(server) == some.all


def test_nothing_is_found_after_a_clear(server: Server, some: Prompts, disk: Attach) -> None:
    with disk():
        some.ask(server)
        assert server.clear()[0] == 200
        server.flush()
        assert some.ask(server)[0] == 0
    with disk():
        some.ask(server)
        assert server.clear()[0] == 200
    with disk():
        assert some.ask(server) == some.none


def test_flipped_bytes_are_never_served(server: Server, some: Prompts, disk: Attach, tmp_path: Path) -> None:
    with disk():
        some.ask(server)
    (slots,) = tmp_path.glob("*/replica0/slots0")
    data = bytearray(slots.read_bytes())
    for place in range(4096 + 100, len(data), 4096):  # after the header, a bit in every 4 KiB
        data[place] ^= 1
    slots.write_bytes(data)
    with disk():
        assert some.ask(server) == some.none
    corrupt = server.metric("kvoffload_tier_blocks_total", tier="disk", outcome="corrupt")
    assert corrupt == sum(some.all) / PAGE
    wait_until(lambda: server.has_logged("corrupt"))


def test_a_full_disk_only_costs_hits(server: Server, some: Prompts, disk: Attach) -> None:
    with disk(opens=False, disk_bytes="900TiB"):
        some.ask(server)  # sends prompts while the disk opens
        wait_until(lambda: server.metric(STATE, tier="disk", state="closed") == 1)
        server.flush()
        assert some.ask(server) == some.none
    wait_until(lambda: server.has_logged("lower disk_bytes or free space"))


def test_bad_settings_are_refused_with_an_error_and_nothing_is_started(
    server: Server, disk: Attach, tmp_path: Path
) -> None:
    status, words = server.attach(disk_path=str(tmp_path), host_bytes="1GiB")
    assert status == 400
    assert "host_bytes does not concern a disk or a remote tier" in words
    assert not list(tmp_path.iterdir())
    with disk():
        pass
