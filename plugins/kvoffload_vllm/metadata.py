"""The messages that vLLM pickles and sends between the connector's scheduler side and worker side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvoffload.model.wire import NOTHING, TransferPlan, TransferReport
from kvoffload.runtime.copies import NO_ANSWERS, LoadAnswers

if TYPE_CHECKING:
    from kvoffload.disk.identity import KVIdentity
    from kvoffload.model.ids import DeviceBlockId


@dataclass(slots=True)
class KVOffloadMetadata(KVConnectorMetadata):  # type: ignore[misc]  # the type checker runs without vLLM
    """The message that the scheduler side sends to the workers in each step.

    Args:
        plan: the copies to start in this step.
        answers: loads that have ended. The workers report the loads without a finished copy to vLLM.
        disk: the KV identity, from which workers find the disk tier's folder; None in all steps except one.
        bad_blocks: the device blocks that the `failed` loads without a copy should have filled.
    """

    plan: TransferPlan = NOTHING
    answers: LoadAnswers = NO_ANSWERS
    disk: KVIdentity | None = None
    bad_blocks: frozenset[DeviceBlockId] = frozenset()


NO_PLAN = KVOffloadMetadata()
"""The message for a step in which nothing is copied."""


class KVOffloadWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]  # the type checker runs without vLLM
    """The message that the workers send to the scheduler side after a step.

    Args:
        reports: the reports of all ranks whose copies have progressed.
    """

    def __init__(self, reports: tuple[TransferReport, ...]) -> None:
        self.reports = reports

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Return a message with the reports of both messages. Duplicate reports have no effect."""
        assert isinstance(other, KVOffloadWorkerMetadata), other
        return KVOffloadWorkerMetadata(self.reports + other.reports)
