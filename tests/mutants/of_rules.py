"""The list. Each breaks the rule it is named for in one place; all of them must be noticed."""

from __future__ import annotations

from tests.mutants.mutant import BUS, CUDA, DISK, ENGINE, REMOTE, RUNTIME, TRANSFER, Mutant

_CORE = "kvoffload/core/offload_core.py"
_LOADS = "kvoffload/core/loads.py"
_STORES = "kvoffload/core/stores.py"
_JOBS = "kvoffload/core/jobs.py"
_REQUEST = "kvoffload/core/request.py"
_POOL = "kvoffload/core/slots.py"
_RETENTION = "kvoffload/core/retention.py"
_TABLES = "kvoffload/core/block_tables.py"
_CAPACITY = "kvoffload/engine/groups.py"
_COPIES = "kvoffload/runtime/copies.py"
_FAULTS = "kvoffload/runtime/faults.py"
_SIDE = "kvoffload/runtime/scheduler_side.py"
_PUMP = "kvoffload/transfer/pump.py"
_CUDA_COPIER = "kvoffload/transfer/cuda/copier.py"
_CUDA_DRIVER = "kvoffload/transfer/cuda/driver.py"
_TIERS = "kvoffload/core/tiers.py"
_TIER_COPIES = "kvoffload/core/tier_copies.py"
_INDEX = "kvoffload/runtime/disk_catalog.py"
_CALLS = "kvoffload/transfer/blocking_calls.py"
_TIER_JOBS = "kvoffload/transfer/tier_jobs.py"
_DISK = "kvoffload/transfer/disk.py"
_FORMAT = "kvoffload/disk/index_format.py"
_WEIGHTS = "kvoffload/disk/weights.py"
_VLLM_IDENTITY = "plugins/kvoffload_vllm/kv_identity.py"
_REMOTE_CATALOG = "kvoffload/runtime/remote_catalog.py"
_REMOTE = "kvoffload/transfer/remote.py"

_PROGRESS = "plugins/kvoffload_vllm/progress.py"

_FOUND = ("tests/explore/test_found.py",)
_DISK_CORE = ("tests/core/test_disk.py",)
_DISK_SIDE = ("tests/runtime/test_disk_side.py",)
_COPIES_OF_DISK = ("tests/transfer/test_disk.py",)
_ENGINE_OF_CALLS = ("tests/transfer/test_blocking_calls.py",)
_OPENING = ("tests/vllm_adapter/test_identification.py",)
_REPORTS = ("tests/vllm_adapter/test_progress.py",)
_FILES = ("tests/disk/test_index_format.py", "tests/disk/test_slot_file.py")

MUTANTS: tuple[Mutant, ...] = (
    # Pins.
    Mutant(1, _LOADS, "state.pool.pin(slots)\n            event", "event"),
    Mutant(1, _LOADS, "self.drop(record, PinDropCause.LOOKED_UP_AGAIN)", "record.hit = None"),
    Mutant(
        1,
        _LOADS,
        "hit, record.hit = record.hit, None\n        if hit is None:",
        "hit = record.hit\n        if hit is None:",
    ),
    Mutant(1, _CORE, "self._hits.drop(record, PinDropCause.REQUEST_ENDED)"),
    Mutant(1, _POOL, "self._order.remove(self._not_held(new))"),
    Mutant(1, _POOL, "counts[item] = counts.get(item, 0) + 1", "counts[item] = 1"),
    # What engines do.
    Mutant(2, _LOADS, "if hit is None or length > hit.tokens:", "if False:"),
    Mutant(2, _LOADS, "self._state.pool.unpin(hit.slots)\n        if rest", "if rest"),
    Mutant(2, _LOADS, "self._state.results.failed.append(request)"),
    Mutant(2, _LOADS, "self._hits.unpin(record, hit)"),
    Mutant(2, _CORE, "max(confirmed_tokens, record.confirmed_tokens)", "confirmed_tokens"),
    Mutant(2, _CORE, "if fact.request in live:", "if False:"),
    Mutant(2, _LOADS, "limit = record.prompt_tokens - 1", "limit = record.prompt_tokens"),
    Mutant(2, "kvoffload/core/match.py", "group.block_tokens if group.reads_ahead else 0", "0"),
    # In-flight stores.
    Mutant(3, _STORES, "if block in state.leases.counts:", "if False:"),
    Mutant(3, _STORES, "and offer.block not in copied and", "and"),
    Mutant(3, _STORES, "elif key in keys_in_flight:", "elif False:"),
    Mutant(3, _STORES, "in_flight.keys.keys().isdisjoint(keys) and ", ""),
    Mutant(3, _STORES, "            and state.leases.counts.keys().isdisjoint(blocks)\n", ""),
    Mutant(3, _STORES, "            and len(set(keys)) == len(keys)\n", ""),
    Mutant(3, _STORES, "if key in accepted:", "if False:"),
    Mutant(3, _STORES, "                in_flight.wait(offer)", "                pass"),
    Mutant(3, _STORES, "self.in_flight.wait(duplicate)"),
    Mutant(3, _STORES, "self.again += self.in_flight", "self.in_flight"),
    # Ranks.
    Mutant(4, _CORE, "            if not job.waiting:\n", "            if True:\n"),
    Mutant(4, _CORE, "            if not job.waiting:\n", "            if True:\n", _DISK_CORE),
    Mutant(4, _JOBS, "if rank not in self.waiting:", "if False:"),
    Mutant(4, _JOBS, "self.failed = outcome"),
    Mutant(
        4,
        _STORES,
        "if report.outcome is not CopyOutcome.DONE and not job.settled:",
        "if report.outcome is not CopyOutcome.DONE and not job.waiting and not job.settled:",
    ),
    Mutant(4, _CORE, "grow(min(state.ready.values()))", "grow(max(state.ready.values()))"),
    Mutant(
        4,
        _STORES,
        "                pool.invalidate(slot)\n",
        "                pool.invalidate(slot)\n                pool.drained((slot,))\n",
    ),
    # Leases.
    Mutant(5, _JOBS, "self._device.lease(blocks)"),
    Mutant(5, _JOBS, "self._device.release(blocks[::-1])"),
    Mutant(5, _JOBS, "self._device.release(blocks[::-1])", "self._device.release(blocks)"),
    Mutant(5, _POOL, "if sum(map(counts.__getitem__, items)) == len(items):", "if False:"),
    Mutant(5, _POOL, "counts[item] = left"),
    Mutant(5, _STORES, "self._lease_limit - self.leased_blocks", "self._state.shape.device_blocks"),
    Mutant(5, _STORES, "            and len(keys) <= min(state.pool.room, self.room)\n", ""),
    Mutant(5, _STORES, "state.leases.release(job.targets)"),
    Mutant(5, _STORES, "            state.pool.drained(job.slots)\n", "            pass\n"),
    Mutant(5, _JOBS, "            job.owner.ended(job)\n", "\n"),
    Mutant(5, _LOADS, "state.leases.release(job.targets)"),
    # One formula.
    Mutant(6, _CAPACITY, "return _blocks(tokens, group) + 1", "return _blocks(tokens, group)", ENGINE),
    Mutant(
        6, _CAPACITY, "group.window_tokens - 1 + self.in_flight_tokens", "group.window_tokens - 1", ENGINE
    ),
    Mutant(6, _CAPACITY, "group.chunk_tokens + self.in_flight_tokens", "group.chunk_tokens", ENGINE),
    # Stale blocks.
    Mutant(7, _TABLES, "record.table[group][position] = NULL_BLOCK"),
    Mutant(7, _TABLES, "self._name(named)"),
    Mutant(7, _CORE, "handed_out([*fact.handed_out, *grown])", "handed_out(grown)"),
    Mutant(7, _CORE, "handed_out([*fact.handed_out, *grown])", "handed_out(fact.handed_out)"),
    Mutant(7, _CORE, "self._handed_out(self._new_blocks(fact), since_reset=record.may_store)"),
    Mutant(7, _STORES, "            and held == keys\n", ""),
    Mutant(7, _STORES, "holds == key and offer.block", "offer.block"),
    Mutant(7, _STORES, "if holds != offer.key:", "if holds is None:"),
    Mutant(7, _STORES, "block = state.device.block_of(offer.key) or NULL_BLOCK", "block = NULL_BLOCK"),
    # Evictions.
    Mutant(8, _STORES, "if offer.key not in record.stored_again:", "if True:"),
    Mutant(8, _STORES, "record.stored_again.add(key)"),
    Mutant(8, _STORES, "self.again += again"),
    Mutant(
        8,
        _STORES,
        "                self.evictions.add(record, offer)\n\n    def next_step",
        "                pass\n\n    def next_step",
    ),
    Mutant(
        8,
        _STORES,
        "                self.evictions.add(record, offer)\n        if ownerless",
        "                pass\n        if ownerless",
    ),
    Mutant(
        8,
        _RETENTION,
        "                record.held += slots\n                held += slots\n",
        "                pass\n",
    ),
    Mutant(8, _LOADS, "self._state.retention.add(record, pool.pinned(job.slots))", "pool.pinned(job.slots)"),
    # Failed loads.
    Mutant(9, _LOADS, "record.load_failed = True"),
    Mutant(9, _LOADS, "self._answer(job.record, job.incarnation, loaded=False)"),
    Mutant(9, _LOADS, "self._distrust(job, report)"),
    Mutant(9, _LOADS, "if job.failed is None and state.degraded", "if state.degraded"),
    Mutant(9, _LOADS, "[job.slots[position] for position in report.corrupt] or job.slots", "job.slots"),
    Mutant(9, _LOADS, "for position in report.corrupt] or job.slots", "for position in report.corrupt]"),
    Mutant(9, _LOADS, "if record.load_failed:", "if False:"),
    Mutant(
        9,
        _COPIES,
        "                copy.is_awaited = False\n",
        "\n",
        RUNTIME,
    ),
    # Resets.
    Mutant(10, _CORE, "record.may_store = False"),
    Mutant(10, _CORE, "dropped = state.pool.forget_all()", "dropped = {}"),
    Mutant(10, _CORE, "self.stores.stop(StoreOutcome.BEFORE_RESET)"),
    Mutant(10, _CORE, "self._hits.drop(record, PinDropCause.RESET)"),
    Mutant(10, _CORE, "state.computed_since_reset.clear()"),
    Mutant(
        10,
        _CORE,
        "            self.stores.evictions.forget(record)\n            state.shared.ended(record)\n",
        "            state.shared.ended(record)\n",
    ),
    Mutant(10, _CORE, "not self.state.epoch or self._is_untainted(fact)", "True"),
    Mutant(10, _CORE, "self._separate_grown(fact)"),
    Mutant(10, _STORES, "if state.epoch and not self._is_since_reset(offer, block):", "if False:"),
    Mutant(10, _STORES, " and not state.epoch\n", "\n"),
    Mutant(10, _STORES, "not state.epoch\n            and", "True and"),
    # The end.
    Mutant(
        11,
        _CORE,
        "            self.stores.evictions.forget(record)\n        if record.loading:",
        "            pass\n        if record.loading:",
    ),
    Mutant(11, _CORE, "state.tables.forget(record)"),
    Mutant(11, _CORE, "self.stores.settle_waiting(record, StoreOutcome.REQUEST_GONE)"),
    Mutant(11, _REQUEST, "self.finishing.discard(record)"),
    Mutant(11, _STORES, "self.for_room.pop(record, None)"),
    Mutant(11, _RETENTION, "record.held.clear()"),
    # Off for good.
    Mutant(12, _STORES, "if self._state.degraded is not None:", "if False:"),
    Mutant(12, _LOADS, "if state.degraded is not None:", "if False:"),
    Mutant(12, _LOADS, "if job.failed is None and state.degraded is None:", "if job.failed is None:"),
    Mutant(12, _CORE, "is_last or job.state is JobState.PLANNED or not", "is_last or not"),
    Mutant(12, _CORE, "self.stores.stop(StoreOutcome.DEGRADED)"),
    Mutant(
        12,
        "kvoffload/bus/bus.py",
        "self._routes[cls] = [react for react in reacting if react != subscriber]",
        tests=BUS,
    ),
    Mutant(12, _FAULTS, "self.raised(error, name)", tests=RUNTIME),
    Mutant(12, _FAULTS, "self._bus.drop_handlers()", tests=RUNTIME),
    Mutant(12, _FAULTS, "        self.release_loose()\n", "\n", tests=RUNTIME),
    Mutant(12, _FAULTS, " - self._copies.blocks()", "", tests=RUNTIME),
    Mutant(12, _SIDE, "results.failed += self.copies.awaited_requests", tests=RUNTIME),
    Mutant(12, _SIDE, "self.faults.release_loose()", tests=RUNTIME),
    Mutant(12, _CORE, "if is_last or job.state is", "if job.state is", RUNTIME),
    Mutant(12, _COPIES, "copy.running.discard(report.rank)", "copy.running.clear()", tests=RUNTIME),
    # Fences.
    Mutant(13, _PUMP, "job.fence = fence", tests=TRANSFER),
    Mutant(13, _CUDA_COPIER, "self._driver.wait(self._stream, fence)", tests=CUDA),
    Mutant(13, _CUDA_DRIVER, "{way: _Attributes(order)", "{way: _Attributes(_ANY_TIME)", CUDA),
    Mutant(13, _CUDA_COPIER, "        self._driver.record(self._events[1], self._stream)\n", "", CUDA),
    Mutant(13, _CUDA_DRIVER, "self.library.cuCtxSetCurrent(self._context)", "pass", CUDA),
    # Slices of a large load.
    Mutant(
        9,
        _CUDA_COPIER,
        "            if self._left:\n                return TicketState.PENDING\n",
        "",
        CUDA,
    ),
    Mutant(9, _CUDA_COPIER, "            self._left.clear()\n", "", CUDA),
    Mutant(9, _CUDA_COPIER, "            self._is_whole = False\n", "", CUDA),
    Mutant(
        13,
        "kvoffload/runtime/worker_side.py",
        "self._load_fence = self._live_pump.fence() if plan.loads else None",
        "self._load_fence = None",
        CUDA,
    ),
    # Shared loads.
    Mutant(14, _LOADS, "state.shared.owner(slots) if may_wait and state.shared.owners else None", "None"),
    Mutant(14, _LOADS, "if may_wait and state.shared.owners else None", "if state.shared.owners else None"),
    Mutant(14, _CORE, "can_wait = may_wait and state.shape.promises.can_wait", "can_wait = may_wait"),
    Mutant(
        14,
        _CORE,
        "            self.state.shared.ended(record)\n        self._new",
        "            pass\n        self._new",
    ),
    Mutant(14, _CORE, "                state.shared.ended(record)\n", "                pass\n"),
    Mutant(
        14,
        _CORE,
        "        if record.loading:\n            state.shared.ended(record)\n\n",
        "\n",
    ),
    Mutant(14, _LOADS, "        state.shared.ended(record)\n", "\n"),
    Mutant(14, _REQUEST, "owners.remove(record)", "owners.clear()"),
    Mutant(
        14,
        _SIDE,
        "may_wait=not self._deferred or self._may_wait(request, began)",
        "may_wait=True",
        RUNTIME,
    ),
    # The order of eviction.
    Mutant(15, _POOL, "uncount(self.pins, slots[::-1])", "uncount(self.pins, slots)"),
    Mutant(15, _POOL, "reversed(dict.fromkeys(reversed(slots)))", "dict.fromkeys(slots)"),
    Mutant(15, _STORES, "state.pool.fill(job.slots[::-1])", "state.pool.fill(job.slots)"),
    Mutant(15, _STORES, "for offer in reversed(offers):", "for offer in offers:"),
    Mutant(15, _RETENTION, " or tokens != sorted(tokens):", ":"),
    Mutant(15, _RETENTION, "tokens[0] < record.held_to or incarnation", "incarnation"),
    Mutant(15, _RETENTION, "record.held_to or incarnation != record.incarnation or", "record.held_to or"),
    Mutant(15, _RETENTION, "self._pool.release(record.held[::-1])", "self._pool.release(record.held)"),
    Mutant(15, _RETENTION, "if record.shares or record.found_tokens:", "if False:"),
    Mutant(15, _RETENTION, "if record.shares or record.found_tokens:", "if record.shares:"),
    Mutant(15, _RETENTION, "numbered.sort(key=itemgetter(0))"),
    Mutant(15, _RETENTION, "if one[0] == last or index.get(one[1]) in held]", "]"),
    Mutant(15, _RETENTION, "one[0] == last or index.get(one[1]) in held", "one[0] == last"),
    Mutant(18, _RETENTION, "record.loaded_tokens, state=record.loaded_tokens)", "record.loaded_tokens)"),
    Mutant(15, _LOADS, "self._state.retention.used(record, hit.device_tokens)"),
    Mutant(15, _LOADS, "self._state.retention.used(record, record.found_tokens)"),
    Mutant(15, _POOL, "links = self._after", "links = self._before"),
    Mutant(15, _POOL, "self._before[slot] = _END"),
    # Recurrent states: when they are offered, and which of them.
    Mutant(
        10,
        _CORE,
        "        advanced = self._advance(fact) if fact.progress or fact.handed_out else []\n        if state.degraded is None:\n",
        "        if fact.states:\n            self._offer_states(fact.states)\n"
        "        advanced = self._advance(fact) if fact.progress or fact.handed_out else []\n"
        "        if state.degraded is None:\n",
    ),
    Mutant(
        2,
        _CORE,
        "if record is None or record.state is not _RUNNING:\n                self.stores",
        "if record is None:\n                self.stores",
    ),
    Mutant(2, _CORE, "if record.keys[group][position : position + 1] != [key]:", "if False:"),
    Mutant(5, _STORES, "(self.states_for_room, self.for_room)", "(self.for_room, self.states_for_room)"),
    Mutant(
        7,
        _TABLES,
        "self._name({block: (record, group, position)})",
        "pass",
    ),
    Mutant(7, _TABLES, "stale += self.shared.pop(block)", "self.shared.pop(block)"),
    Mutant(7, _PROGRESS, "handed_out += chain.from_iterable(table)", "pass", _REPORTS),
    Mutant(7, _PROGRESS, "if tracked is None or name not in scheduled:", "if tracked is None:", _REPORTS),
    Mutant(7, _PROGRESS, "return self._late.pop(name, ())", "return self._late.get(name, ())", _REPORTS),
    Mutant(7, _PROGRESS, "while every > 1 and every * tokens > self._least_block:", "while False:", _REPORTS),
    Mutant(
        8,
        "kvoffload/core/planners.py",
        "self._stores.offer(offers)\n\n    def ending(self, record: RequestRecord) -> None:\n        self._due",
        "self._stores.offer(offers, last_chance=True)\n\n    def ending(self, record: RequestRecord) -> None:\n        self._due",
    ),
    # Copies that never end.
    Mutant(16, _STORES, "pool.quarantine(slot)", "pool.invalidate(slot)"),
    Mutant(
        16,
        _LOADS,
        "sum(map(pool.quarantine, job.slots)))",
        "sum(map(pool.invalidate, job.slots)))",
    ),
    Mutant(16, _CORE, "self._has_work(self.state.jobs.pending)", "self._has_work(len(self.state.jobs.open))"),
    Mutant(16, _CORE, "record.has_timed_out = True"),
    Mutant(16, _CORE, "if job is None or job.state is not JobState.SUBMITTED:", "if job is None:"),
    Mutant(16, _COPIES, "+ self.timeout_s <= now:", "+ 1e9 <= now:", RUNTIME),
    Mutant(16, _CORE, "if state.stall.blocks and", "if state.stall.jobs_in_a_row and"),
    Mutant(16, _JOBS, "self.blocks > self.limit or ", ""),
    Mutant(16, _JOBS, " or self.jobs_in_a_row > _MOST_IN_A_ROW", ""),
    Mutant(16, _JOBS, "return max(self._limit, self._largest)", "return self._limit"),
    Mutant(16, _JOBS, "        self.jobs_in_a_row = 0\n        return", "        return"),
    Mutant(16, _STORES, "return 0 if self._state.stall.is_on else ", "return "),
    Mutant(16, _LOADS, "if state.stall.is_on:", "if False:"),
    Mutant(16, _LOADS, " and not state.stall.is_on", ""),
    Mutant(16, "kvoffload/transfer/lanes.py", "self._written_off.append(batch)", tests=TRANSFER),
    Mutant(
        16,
        _CUDA_COPIER,
        "except DeviceLost:\n            raise\n        except Exception",
        "except ZeroDivisionError",
        CUDA,
    ),
    Mutant(16, _PUMP, "        if left:\n", "        if False:\n", TRANSFER),
    # The disk.
    Mutant(18, _INDEX, "done = self._do(self._reset)", "return True", DISK),
    Mutant(14, _TIER_COPIES, "if block[0] not in on_way]", "]", DISK),
    Mutant(17, _TIER_COPIES, "                tier.invalidate(tier_slot)\n", "                pass\n", DISK),
    Mutant(17, _INDEX, "if Strike in map(type, records):", "if False:", _DISK_SIDE),
    Mutant(
        17,
        _DISK,
        "is_right = are_equal(self._sum(file, job.targets[position], pieces), known)",
        "is_right = True",
        DISK,
    ),
    Mutant(17, _DISK, "if self._key is None:", "if True:", _COPIES_OF_DISK),
    Mutant(
        10,
        _CORE,
        "            if not isinstance(job, Load):\n",
        "            if isinstance(job, DeviceJob):\n",
        _DISK_CORE,
    ),
    Mutant(
        16,
        _TIER_COPIES,
        "            self._written.quarantine(job.written[position])",
        "            pass",
        _DISK_CORE,
    ),
    Mutant(
        16,
        _TIER_COPIES,
        "                self._written.quarantine(slot)\n",
        "                pass\n",
        _DISK_CORE,
    ),
    Mutant(17, _TIER_COPIES, "record.asks_tiers = False", "pass", _DISK_CORE),
    Mutant(17, _TIER_COPIES, "max(state.pool.capacity // 4, 1)", "state.pool.capacity", _DISK_CORE),
    Mutant(17, _CALLS, "call.is_stuck = True", "pass", _ENGINE_OF_CALLS),
    Mutant(17, _CALLS, " and not self._waits", "", _ENGINE_OF_CALLS),
    Mutant(
        17,
        _CALLS,
        "            self.is_closed = False\n            reason",
        "            reason",
        _ENGINE_OF_CALLS,
    ),
    Mutant(
        17, _FORMAT, "if are_equal(_checksum(header, number, runs), checksum) else", "if True else", _FILES
    ),
    Mutant(17, _FORMAT, "if header.key is not None:", "if False:", ("tests/disk/test_index_format.py",)),
    Mutant(
        17,
        "kvoffload/disk/slot_file.py",
        "if bytes(buffer) != _header(file_id, shape, slots):",
        "if False:",
        _FILES,
    ),
    Mutant(
        18,
        _INDEX,
        "        remove_index(self._folder.folder, self._index)\n",
        "        pass\n",
        DISK,
    ),
    Mutant(17, _TIER_JOBS, "checksums.changed(slots)", "()", DISK),
    Mutant(17, _DISK, "self._checksums.take(*[slots[position] for position in part.whole])", "pass", DISK),
    Mutant(16, _CALLS, "call.claim()  # what returns later", "pass  #", _ENGINE_OF_CALLS),
    Mutant(
        16,
        "kvoffload/transfer/arena.py",
        "            if self._holders:",
        "            if False:",
        _COPIES_OF_DISK,
    ),
    Mutant(16, _CALLS, "if not self.token:", "if False:", _COPIES_OF_DISK),
    Mutant(16, _TIER_JOBS, "self.stuck += part.under_call", "pass", _COPIES_OF_DISK),
    Mutant(16, _DISK, "may_change=self._buffers.are_in_place", "may_change=False", _COPIES_OF_DISK),
    Mutant(16, _DISK, "if may_change:", "if True:", _COPIES_OF_DISK),
    Mutant(17, _TIER_JOBS, "if call.result is None:", "if False:", _COPIES_OF_DISK),
    Mutant(14, _CALLS, "if call.is_cancelled or is_late:", "if is_late:", _ENGINE_OF_CALLS),
    Mutant(17, _TIER_COPIES, "if pool.indexed_key(slot) == key", "", DISK),
    Mutant(17, _TIER_COPIES, "sum([pool.quarantine(slot) for slot, _ in corrupt])", "len(corrupt)", DISK),
    Mutant(15, _TIERS, "self.records += reversed(puts)", "self.records += puts", DISK),
    Mutant(
        15,
        _TIER_COPIES,
        "for key in reversed(tier.take_candidates(",
        "for key in (tier.take_candidates(",
        DISK,
    ),
    Mutant(17, _TIER_COPIES, "and is_early and", "and", _DISK_CORE),
    Mutant(17, _TIER_COPIES, "if state.requests.live and is_early", "if is_early", _DISK_CORE),
    Mutant(14, _TIER_COPIES, "if job.wanted or job.settled:", "if job.settled:", DISK),
    Mutant(12, _CORE, "        state.jobs.cancelled.clear()\n", "\n", _FOUND),
    Mutant(17, _TIERS, "in tier_slots if self.has_block[slot]]", "in tier_slots]", _FOUND),
    Mutant(15, _TIER_COPIES, " or key in self._left", "", DISK),
    Mutant(17, _TIER_COPIES, "state.pool.count(SlotState.EMPTY)", "state.pool.room", DISK),
    Mutant(16, "kvoffload/runtime/tiers_side.py", "< self._drain_s", "< 1e9", DISK),
    Mutant(18, "kvoffload/disk/index_format.py", "[max(len(there) - capacity, 0) :]", "", DISK),
    Mutant(18, _VLLM_IDENTITY, "request.lora_request is None and named", "named", _OPENING),
    Mutant(
        18, _VLLM_IDENTITY, "request.lora_request is None and named", "request.lora_request is None", _OPENING
    ),
    Mutant(18, _WEIGHTS, "before.st_ctime_ns > self.loaded_ns", "False", ("tests/disk/test_weights.py",)),
    # The remote tier.
    Mutant(17, _REMOTE, "is_right = is_whole(", "is_right = True or is_whole(", REMOTE),
    Mutant(
        17,
        _REMOTE,
        "self._checksums.take(*[slots[position] for position in part.whole])",
        "pass",
        REMOTE,
    ),
    Mutant(
        17,
        _CALLS,
        "if call.claim():\n            call.is_gone",
        "if True:\n            call.is_gone",
        _ENGINE_OF_CALLS,
    ),
    Mutant(
        17,
        _TIER_COPIES,
        "lost = self._state, job.corrupt | job.missing",
        "lost = self._state, job.corrupt",
        REMOTE,
    ),
    Mutant(
        17,
        _CALLS,
        "            self.is_closed = False\n            self._failures",
        "            self._failures",
        _ENGINE_OF_CALLS,
    ),
    Mutant(17, _CALLS, "hangs or is_on_trial or", "hangs or", _ENGINE_OF_CALLS),
    Mutant(17, _CALLS, "call.is_stuck or call.is_gone", "call.is_stuck", REMOTE),
    Mutant(17, _CALLS, "if not call.is_probe:", "if False:", _ENGINE_OF_CALLS),
    Mutant(17, _REMOTE, "own.known_to is not store", "own.known_to is None", REMOTE),
    Mutant(17, _CALLS, "elif not call.is_write:", "else:", _ENGINE_OF_CALLS),
    Mutant(17, _CALLS, "self._PAUSE_PER_CALL * call.took", "0", _ENGINE_OF_CALLS),
    Mutant(17, _TIER_COPIES, "not (remote.is_usable and ", "not (", REMOTE),
    Mutant(18, _TIERS, 'self.namespace = ""  #', "pass  #", REMOTE),
    Mutant(
        18, _REMOTE_CATALOG, "if self._generation is not None and found.is_after_reset:", "if False:", REMOTE
    ),
    Mutant(
        18,
        _REMOTE_CATALOG,
        "self._generation = secrets.token_hex(16)\n        self._is_fixed = True",
        "pass",
        REMOTE,
    ),
    Mutant(18, _REMOTE_CATALOG, "return not self._has_shared", "return True", REMOTE),
    Mutant(
        18,
        _REMOTE_CATALOG,
        "            self._made_ms = found.made_ms\n            self._has_shared = True\n",
        "",
        REMOTE,
    ),
    Mutant(
        18,
        _REMOTE_CATALOG,
        "data = new_generation(name, self._key, self._made_ms, is_after_reset=True)",
        "data = b'0' * 32",
        REMOTE,
    ),
    Mutant(18, _REMOTE_CATALOG, "if found.made_ms < self._made_ms:", "if False:", REMOTE),
    Mutant(
        17,
        "kvoffload/remote/values.py",
        "hmac.compare_digest(mac, _generation_mac(name, key, dated))",
        "True",
        REMOTE,
    ),
    Mutant(17, _REMOTE, "        call.check()\n", "", REMOTE),
    Mutant(17, _CALLS, "if self._is_closed:  # after", "if False:  # after", _ENGINE_OF_CALLS),
    Mutant(17, _CALLS, "except BaseException as raised:", "except Exception as raised:", _ENGINE_OF_CALLS),
    Mutant(18, _TIER_COPIES, "fact.namespace == remote.namespace", "True", REMOTE),
    Mutant(14, _TIERS, "if key not in index and key not in self.spilling]", "]", REMOTE),
)
