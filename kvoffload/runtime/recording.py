"""Makes the core and its journal; where the journal is for a replay, everything that goes in and out of the core is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from kvoffload.core.offload_core import OffloadCore
from kvoffload.core.state import LoadResults, Policy
from kvoffload.model.config import REPLAY, OffloadConfig, check_promises, checks_first
from kvoffload.model.engine import Device, EngineShape
from kvoffload.model.ids import BlockKey, DeviceBlockId, RequestId
from kvoffload.model.transfer import TransferPlan
from kvoffload.telemetry.journal import FailureCallback, Journal
from kvoffload.telemetry.replay_journal import ReplayJournal

T = TypeVar("T")


def make_journal(config: OffloadConfig, now: Callable[[], float], on_failure: FailureCallback) -> Journal:
    """Return the journal that the operator chose.

    Raises:
        ConfigError: its file cannot be written.
    """
    kind = ReplayJournal if config.journal_for == REPLAY else Journal
    return kind(now, path=config.journal_path, on_failure=on_failure)


def policy_of(config: OffloadConfig, shape: EngineShape, merge_steps: int) -> Policy:
    """Return what the operator chose, as the core wants it.

    Raises:
        ConfigError: the engine promises too little for it.
    """
    check_promises(config, shape.promises)
    least = config.min_load_tokens if isinstance(config.min_load_tokens, int) else shape.alignment
    check_first = checks_first(config, shape.promises)
    return Policy(config.store_policy, config.eviction_policy, least, merge_steps, check_first)


def make_core(shape: EngineShape, policy: Policy, device: Device, journal: Journal) -> OffloadCore:
    """Return the core, watched where the journal is for a replay."""
    if isinstance(journal, ReplayJournal):
        journal.begin(shape, policy)
        return RecordedCore(shape, policy, RecordedDevice(device, journal), journal)
    return OffloadCore(shape, policy, device)


class RecordedDevice:
    """Hands every question on and notes it with its answer."""

    def __init__(self, device: Device, journal: ReplayJournal) -> None:
        self._device = device
        self._journal = journal

    def lease(self, blocks: Sequence[DeviceBlockId]) -> None:
        self._journal.device_asked("lease", list(blocks))
        self._device.lease(blocks)

    def release(self, blocks: Sequence[DeviceBlockId]) -> None:
        self._journal.device_asked("release", list(blocks))
        self._device.release(blocks)

    def next_evictable(self, count: int) -> Iterable[DeviceBlockId]:
        blocks = list(self._device.next_evictable(count))
        self._journal.device_asked("next_evictable", count, blocks)
        return blocks

    def free_blocks(self) -> int:
        blocks = self._device.free_blocks()
        self._journal.device_asked("free_blocks", blocks)
        return blocks

    def key_of(self, block: DeviceBlockId) -> BlockKey | None:
        key = self._device.key_of(block)
        self._journal.device_asked("key_of", block, self._journal.key_number(key))
        return key

    def block_of(self, key: BlockKey) -> DeviceBlockId | None:
        block = self._device.block_of(key)
        self._journal.device_asked("block_of", self._journal.key_number(key), block)
        return block


class RecordedCore(OffloadCore):
    """Answers as any core does, and notes it."""

    def __init__(self, shape: EngineShape, policy: Policy, device: Device, journal: ReplayJournal) -> None:
        super().__init__(shape, policy, device)
        self._journal = journal

    def lookup(self, request: RequestId, device_tokens: int, **arguments: Any) -> int | None:  # noqa: ANN401  # handed on
        told = {"request": request, "device_tokens": device_tokens, **arguments}
        return self._noted("lookup", told, lambda: super(RecordedCore, self).lookup(**told))

    def plan(self) -> TransferPlan:
        return self._noted("plan", {}, super().plan)

    def take_results(self) -> LoadResults:
        if not (self.state.results.loaded or self.state.results.failed):
            return super().take_results()  # nothing changes, and it is asked all the time
        return self._noted("take_results", {}, super().take_results)

    def _noted(self, question: str, arguments: dict[str, object], ask: Callable[[], T]) -> T:
        try:
            answer = ask()
        except Exception as error:
            self._journal.core_asked(question, arguments, None, error)
            raise
        self._journal.core_asked(question, arguments, answer, None)
        return answer
