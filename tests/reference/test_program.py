"""Random programs of requests, aborts, preemptions, resets and faulty copies leave the output unchanged."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvoffload.engine import EngineError, PoolExhausted, Token, TokenStream
from kvoffload.testing import GatedTicket
from tests.engine.tiny import assert_same
from tests.reference.rig import KINDS, TIMEOUT_S, TOLERANCE, Rig, plain, text

BASES = 3
OPEN = 8  # the most requests at a time
TIGHT = {
    "full": 10,
    "sliding_window": 24,
    "chunked_local": 20,
    "recurrent": 14,
}  # pool sizes with room for the longest request


class Program(RuleBasedStateMachine):
    """An engine with the plugin, compared with an engine without it."""

    rig: Rig

    def __init__(self) -> None:
        super().__init__()
        self.open: list[tuple[tuple[int, ...], int, TokenStream]] = []
        self.said: list[tuple[int, ...]] = []  # prompts with their answers, to be continued
        self.stranded: list[GatedTicket] = []  # copies that end only at the end of the test

    @initialize(
        kind=st.sampled_from(KINDS),
        policy=st.sampled_from(["eager", "lazy"]),
        ranks=st.integers(1, 2),
        host=st.sampled_from([1, 3, 10, 40, 2000]),
        spare=st.sampled_from([0, 4, 30, 150]),
        requests=st.sampled_from([2, 64]),
    )
    def start(self, kind: str, policy: str, ranks: int, host: int, spare: int, requests: int) -> None:
        self.rig = Rig(
            kind,
            store_policy=policy,
            ranks=ranks,
            host_blocks=host,
            num_blocks=1 + TIGHT[kind] + spare,
            step_tokens=8,
            max_requests=requests,
        )

    # -- requests -----------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.open) < OPEN)
    @rule(
        base=st.integers(0, BASES - 1),
        shared=st.integers(1, 20),
        own=st.integers(0, 4),
        new=st.integers(1, 6),
    )
    def submit(self, base: int, shared: int, own: int, new: int) -> None:
        self.add((*text(base, shared), *text(100 + own, own)), new)

    @precondition(lambda self: self.said and len(self.open) < OPEN)
    @rule(data=st.data(), new=st.integers(1, 4))
    def go_on(self, data: st.DataObject, new: int) -> None:
        said = data.draw(st.sampled_from(self.said))
        assume(len(said) <= 24)
        self.add((*said, 7), new)

    def add(self, prompt: tuple[int, ...], new: int) -> None:
        self.open.append((prompt, new, self.rig.submit(prompt, new)))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.rig.engine.abort(data.draw(st.sampled_from(self.open))[2].request_id)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.rig.engine.preempt(data.draw(st.sampled_from(self.open))[2].request_id)

    @rule()
    def reset(self) -> None:
        self.rig.engine.reset_prefix_cache()

    @rule()
    def device_forgets(self) -> None:
        self.rig.engine.pool.reset_prefix_cache()  # only if no request uses it

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.rig.step()
        self.collect()

    # -- copies -------------------------------------------------------------------------------------------------

    @rule()
    def hold(self) -> None:
        self.rig.hold()

    @rule()
    def release(self) -> None:
        for copier in self.rig.copiers:
            copier._held = False
        for ticket in self.running():
            ticket.finish()

    @precondition(lambda self: self.running())
    @rule(data=st.data(), how=st.sampled_from(["finish", "finish", "fail", "tear"]))
    def end_one(self, data: st.DataObject, how: str) -> None:
        getattr(data.draw(st.sampled_from(self.running())), how)()

    @precondition(lambda self: self.stranded)
    @rule(data=st.data(), how=st.sampled_from(["finish", "fail", "tear"]))
    def end_late(self, data: st.DataObject, how: str) -> None:
        ticket = data.draw(st.sampled_from(self.stranded))
        self.stranded.remove(ticket)
        getattr(ticket, how)()

    @rule(part=st.sampled_from([0.4, 1.1]))
    def time_passes(self, part: float) -> None:
        """Copies that are open for longer than the timeout are abandoned, whether or not they end later."""
        if part > 1:
            self.stranded += self.running()
        self.rig.pass_time(part * TIMEOUT_S)
        self.rig.step()
        self.collect()

    @property
    def has_lost_blocks(self) -> bool:
        """Return whether copies were abandoned, so that the device may lack blocks for a request."""
        abandoned = (self.rig.count(name, "abandoned") for name in ("store_blocks", "load_blocks"))
        return any(abandoned)

    def running(self) -> list[GatedTicket]:
        return [t for copier in self.rig.copiers for t in copier.open_tickets if t not in self.stranded]

    # -- what must hold -----------------------------------------------------------------------------------------

    def collect(self) -> None:
        """Compare the answers of requests that have ended."""
        for entry in tuple(self.open):
            prompt, new, stream = entry
            if stream.request_id in self.rig.engine._open:
                continue
            self.open.remove(entry)
            found, error = answer(stream)
            assert error is None or (self.has_lost_blocks and isinstance(error, PoolExhausted)), error
            assert_same(found, plain(self.rig.kind, prompt, new)[: len(found)], TOLERANCE)
            self.said.append((*prompt, *(token.token_id for token in found)))

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        try:
            self.settle()
        finally:
            for ticket in self.stranded:
                ticket.fail()
            self.rig.release()
            self.rig.pass_time(3 * TIMEOUT_S)
            self.rig.close()

    def settle(self) -> None:
        self.release()
        self.rig.drain()
        self.hear_late_ends()
        self.collect()
        assert not self.open
        lost = self.rig.offload.core.state.leases.counts
        assert bool(self.stranded) >= bool(lost)
        self.rig.assert_clean(lost_blocks=len(lost))
        for ticket in self.stranded:
            ticket.finish()  # Abandoned copies write to memory that no request reads.
        self.stranded.clear()
        self.hear_late_ends()
        for base in range(BASES):
            self.add(text(base, 20), 3)
        self.rig.drain()
        self.collect()
        self.rig.assert_clean()
        slots = self.rig.offload.gauges()["kvoffload_slots"]
        assert not any(slots["host", state] for state in ("filling", "pinned", "draining"))

    def hear_late_ends(self) -> None:
        """Abandoned copies are queried rarely. With `lazy`, these steps may start further stores."""
        for _ in range(3):
            self.rig.step(TIMEOUT_S / 4)
        self.rig.drain()


def answer(stream: TokenStream) -> tuple[list[Token], EngineError | None]:
    """Return the tokens so far, and the error that ended the request early, if any."""
    found: list[Token] = []
    while not stream._arrived.empty():
        item: Any = stream._arrived.get_nowait()
        if isinstance(item, EngineError):
            return found, item
        if isinstance(item, Token):
            found.append(item)
    return found, None


TestProgram = pytest.mark.slow(pytest.mark.timeout(600)(Program.TestCase))
