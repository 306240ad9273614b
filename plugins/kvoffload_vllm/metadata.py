"""What crosses between the scheduler's process and the workers': vLLM carries it, picklable both ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvoffload.model.ids import DeviceBlockId, JobId
from kvoffload.model.transfer import TransferPlan, TransferReport


@dataclass(slots=True)
class KVOffloadMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """A step's plan.

    Args:
        plan: what to copy.
        loading: the request that each load is for, with the blocks that it fills.
        loaded, failed: requests whose load has ended without a copy on any worker; each worker reports them once.
        given_up: loads that take too long; a worker where one still runs reports its request as failed.
    """

    plan: TransferPlan = field(default_factory=TransferPlan)
    loading: Mapping[JobId, tuple[str, tuple[DeviceBlockId, ...]]] = field(default_factory=dict)
    loaded: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    given_up: tuple[JobId, ...] = ()


class KVOffloadWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """What the workers have to tell after a step.

    Args:
        reports: one a rank that has news.
    """

    def __init__(self, reports: tuple[TransferReport, ...]) -> None:
        self.reports = reports

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Return both workers' reports; hearing one twice changes nothing."""
        assert isinstance(other, KVOffloadWorkerMetadata), other
        return KVOffloadWorkerMetadata(self.reports + other.reports)
