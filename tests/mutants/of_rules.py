"""The list. Each breaks the rule it is named for in one place; all of them must be noticed."""

from __future__ import annotations

from tests.mutants.mutant import BUS, ENGINE, RUNTIME, TRANSFER, Mutant

_POOL = "kvoffload/core/host_pool.py"
_LOOKUPS = "kvoffload/core/lookup_desk.py"
_LOADS = "kvoffload/core/load_desk.py"
_STORES = "kvoffload/core/store_desk.py"
_BOOK = "kvoffload/core/offer_book.py"
_TRANSFERS = "kvoffload/core/transfers.py"
_CORE = "kvoffload/core/offload_core.py"
_INTAKE = "kvoffload/core/intake.py"
_LEASES = "kvoffload/core/leases.py"
_HOLDS = "kvoffload/core/holds.py"
_CHECKS = "kvoffload/core/check_desk.py"
_CAPACITY = "kvoffload/engine/capacity.py"
_DEADLINES = "kvoffload/runtime/deadlines.py"
_BROKEN = "kvoffload/runtime/broken_core.py"
_SIDE = "kvoffload/runtime/scheduler_side.py"
_STALL = "kvoffload/core/stall.py"
_COPIES = "kvoffload/runtime/open_copies.py"
_FLOW = "kvoffload/transfer/flow.py"

MUTANTS: tuple[Mutant, ...] = (
    # Pins.
    Mutant(1, _LOOKUPS, "pins = state.pool.pin(slots)", "pins = None"),
    Mutant(1, _LOOKUPS, "self.drop(request, PinDropCause.LOOKED_UP_AGAIN)", "state.hits.take(request)"),
    Mutant(1, _LOADS, "self._lookups.drop(record.request, PinDropCause.REQUEST_ENDED)"),
    Mutant(1, _POOL, "self._order.remove(self._not_held(slots))"),
    Mutant(1, _CHECKS, "job.pins = state.pool.pin(slots)", "job.pins = state.pool.pin(())"),
    Mutant(1, "kvoffload/core/checked_slots.py", "self._checked.difference_update(gone)"),
    # What engines do.
    Mutant(2, _LOADS, "if hit is None or length > hit.tokens:", "if False:"),
    Mutant(2, _LOADS, "            hit.pins.close()\n            if rest", "            if rest"),
    Mutant(2, _LOADS, "self._state.results.failed.append(fact.request)"),
    Mutant(2, _INTAKE, "if confirmed_tokens > record.confirmed_tokens:", "if True:"),
    Mutant(2, _LOOKUPS, "limit = record.prompt_tokens - 1", "limit = record.prompt_tokens"),
    Mutant(2, "kvoffload/core/lookup.py", "group.block_tokens if group.reads_ahead else 0", "0"),
    # In-flight stores.
    Mutant(3, _STORES, "if block in state.stores.blocks:", "if False:"),
    Mutant(3, _STORES, "if offer.key in state.stores.keys:", "if False:"),
    Mutant(
        3, _STORES, "self._book.again(self._state.stores.settled(keys))", "self._state.stores.settled(keys)"
    ),
    Mutant(3, _STORES, "state.stores.ended(job.blocks)"),
    # Ranks.
    Mutant(4, "kvoffload/core/jobs.py", "return not self.waiting", "return True"),
    Mutant(4, "kvoffload/core/jobs.py", "if rank not in job.waiting:", "if False:"),
    Mutant(
        4,
        _TRANSFERS,
        "if outcome is not CopyOutcome.DONE and not job.settled:",
        "if outcome is not CopyOutcome.DONE and job.copies_ended and not job.settled:",
    ),
    Mutant(4, _TRANSFERS, "state.pool.grow(min(state.ready))", "state.pool.grow(max(state.ready))"),
    Mutant(
        4,
        _STORES,
        "            self._state.pool.doom(slot)\n",
        "            self._state.pool.doom(slot)\n            self._state.pool.drained((slot,))\n",
    ),
    Mutant(
        4,
        _TRANSFERS,
        "        if not job.copies_ended:\n            return\n        if job.direction is Direction.CHECK:",
        "        if job.direction is Direction.CHECK:",
    ),
    # Leases.
    Mutant(5, _LEASES, "self._device.lease(blocks)"),
    Mutant(5, _LEASES, "self._device.release(blocks)"),
    Mutant(5, _LEASES, "raise ClosedTwice(self)", "return"),
    Mutant(5, _LEASES, "self._leases.give_back(self.blocks[::-1])", "self._leases.give_back(self.blocks)"),
    Mutant(
        5, _STORES, "self._state.shape.lease_limit - self.leased_blocks", "self._state.shape.device_blocks"
    ),
    Mutant(5, _STORES, "job.lease.close()"),
    Mutant(5, _LOADS, "        job.lease.close()\n", "\n"),
    # One formula.
    Mutant(6, _CAPACITY, "return _blocks(tokens, group) + 1", "return _blocks(tokens, group)", ENGINE),
    Mutant(
        6, _CAPACITY, "group.window_tokens - 1 + self.in_flight_tokens", "group.window_tokens - 1", ENGINE
    ),
    Mutant(6, _CAPACITY, "group.chunk_tokens + self.in_flight_tokens", "group.chunk_tokens", ENGINE),
    # Stale blocks.
    Mutant(7, "kvoffload/core/stale_blocks.py", "self._tables[request][group][position] = NULL_BLOCK"),
    Mutant(7, _INTAKE, "self._strike([*fact.handed_out, *grown])", "self._strike(grown)"),
    Mutant(7, _INTAKE, "self._strike([*fact.handed_out, *grown])", "self._strike(fact.handed_out)"),
    Mutant(7, _INTAKE, "self._handed_out(self._new_blocks(fact), since_reset=record.stores)"),
    Mutant(7, _STORES, "if held != offer.key:", "if held is None:"),
    Mutant(7, _STORES, "block = state.device.block_of(offer.key) or NULL_BLOCK", "block = NULL_BLOCK"),
    # Evictions.
    Mutant(8, _BOOK, "if offer.key not in record.restored:", "if True:"),
    Mutant(8, _BOOK, "self._again += again"),
    Mutant(8, _STORES, "state.holds.add(record, stored)"),
    Mutant(8, _LOADS, "self._state.holds.add(record, whole)"),
    # Failed loads.
    Mutant(9, _LOADS, "record.load_failed = True"),
    Mutant(9, _LOOKUPS, "        if not unchecked:\n            return tokens\n", "        return tokens\n"),
    Mutant(9, _LOOKUPS, "if unchecked and not may_wait:", "if False:"),
    Mutant(9, _LOADS, "        self._finish(*job.request, loaded=False)\n", "\n"),
    Mutant(9, _TRANSFERS, "self._loads.doubted(job, part)"),
    Mutant(9, _LOOKUPS, "if record.load_failed:", "if False:"),
    Mutant(
        9,
        "kvoffload/runtime/awaited_loads.py",
        "return self._requests.pop(request, self) is None",
        "return True",
        RUNTIME,
    ),
    # Resets.
    Mutant(10, _CORE, "record.stores = False"),
    Mutant(10, _CORE, "dropped = state.pool.forget_all()", "dropped = {}"),
    Mutant(10, _CORE, "self._stores.stop(StoreOutcome.BEFORE_RESET, planned=StoreOutcome.CANCELLED)"),
    Mutant(10, _CORE, "self._lookups.reset()"),
    Mutant(10, _INTAKE, "if not state.generation:", "if True:"),
    Mutant(10, _INTAKE, "self._separate_new(fact)"),
    Mutant(10, _STORES, "if state.generation and not self._since_reset(offer, block):", "if False:"),
    # The end.
    Mutant(11, _INTAKE, "state.restores.forget(record.request)"),
    Mutant(11, _INTAKE, "state.tables.forget(record.request)"),
    Mutant(11, "kvoffload/core/requests.py", "self._finishing.discard(record)"),
    Mutant(11, _CORE, "self._book.settle_unsettled(record, StoreOutcome.REQUEST_GONE)"),
    Mutant(11, _HOLDS, "record.held.clear()"),
    # Off for good.
    Mutant(12, _STORES, "if state.degraded:", "if False:"),
    Mutant(12, _LOOKUPS, "    if state.degraded:", "    if False:"),
    Mutant(12, _CORE, "self._loads.cancel_planned()"),
    Mutant(12, _CORE, "self._checks.cancel_planned()"),
    Mutant(
        12,
        "kvoffload/bus/bus.py",
        "self._counters = [entry for entry in self._counters if entry[1] != counter]",
        tests=BUS,
    ),
    Mutant(12, _BROKEN, "self.raised(error, name)", tests=RUNTIME),
    Mutant(12, _BROKEN, "        self._bus.drop_handlers()\n        for", "        for", tests=RUNTIME),
    Mutant(
        12,
        _BROKEN,
        "            follower.forget_all()\n        self.give_back()",
        "            follower.forget_all()",
        tests=RUNTIME,
    ),
    Mutant(12, _BROKEN, " - self._copies.blocks()", "", tests=RUNTIME),
    Mutant(12, _SIDE, "results.failed += self._awaited.give_up()", tests=RUNTIME),
    Mutant(12, _SIDE, "self._broken.give_back()", tests=RUNTIME),
    Mutant(12, _CORE, "self._loads.fail_open()", tests=RUNTIME),
    Mutant(12, _COPIES, "copy.running.discard(report.rank)", "copy.running.clear()", tests=RUNTIME),
    # Fences.
    Mutant(13, _FLOW, "job.fence = fence", tests=TRANSFER),
    # Shared loads.
    Mutant(14, _LOOKUPS, "state.shared.owner(slots) if may_wait else None", "None"),
    Mutant(
        14,
        _LOOKUPS,
        "state.shared.owner(slots) if may_wait else None",
        "state.shared.owner(slots)",
    ),
    Mutant(14, _INTAKE, "            shared.ended(request)\n", "\n"),
    Mutant(14, _INTAKE, "state.shared.ended(fact.request)"),
    Mutant(14, _LOADS, "        state.shared.ended(request)\n", "\n"),
    Mutant(14, "kvoffload/core/shared_loads.py", "owners.remove(request)", "owners.clear()"),
    Mutant(14, _DEADLINES, "return since is None or now - since < self._timeout_s", "return True", RUNTIME),
    # The order of eviction.
    Mutant(
        15, _POOL, "pins, deepest_first = self._pins, slots[::-1]", "pins, deepest_first = self._pins, slots"
    ),
    Mutant(15, _STORES, "state.pool.fill(job.slots[::-1])", "state.pool.fill(job.slots)"),
    Mutant(15, _HOLDS, "unhold(reversed(record.held))", "unhold(record.held)"),
    Mutant(15, _HOLDS, "if record.shares or record.found_tokens:", "if False:"),
    Mutant(15, _HOLDS, "record.shares or record.found_tokens", "record.shares"),
    Mutant(15, _LOOKUPS, "state.holds.head_was_used(record, hit.device_tokens)"),
    Mutant(15, _LOADS, "self._state.holds.head_was_used(record, hit.device_tokens)"),
    Mutant(15, _LOADS, "state.holds.head_was_used(record, fact.device_tokens)"),
    Mutant(15, "kvoffload/core/eviction.py", "links = self._after", "links = self._before"),
    # Copies that never end.
    Mutant(16, _TRANSFERS, "self._state.pool.quarantine(slot)", "self._state.pool.doom(slot)"),
    Mutant(
        16,
        _LOADS,
        "sum(map(self._state.pool.quarantine, job.slots))",
        "sum(map(self._state.pool.doom, job.slots))",
    ),
    Mutant(
        16,
        _CORE,
        "return bool(\n            state.jobs.pending or",
        "return bool(\n            state.jobs.all() or",
    ),
    Mutant(16, _COPIES, "+ self._timeout_s <= now:", "+ 1e9 <= now:", RUNTIME),
    Mutant(16, _TRANSFERS, "self._checks.abandoned(job)"),
    Mutant(16, _STALL, "self.blocks > self.limit or ", ""),
    Mutant(16, _STALL, " or self.jobs_in_a_row > _MOST_IN_A_ROW", ""),
    Mutant(16, _STALL, "return max(self._limit, self._largest)", "return self._limit"),
    Mutant(16, _STALL, "            self.jobs_in_a_row = 0\n", "            pass\n"),
    Mutant(16, _STORES, "return 0 if self._state.stall.is_on else ", "return "),
    Mutant(16, _LOOKUPS, "return MissCause.STALLED if state.stall.is_on else None", "return None"),
    Mutant(16, _LOADS, "not (state.degraded or state.stall.is_on)", "not state.degraded"),
    Mutant(16, "kvoffload/transfer/lanes.py", "self._written_off.append(batch)", tests=TRANSFER),
    Mutant(16, "kvoffload/transfer/pump.py", "        if left:\n", "        if False:\n", TRANSFER),
)
