"""Sends metrics from the scheduler's side to vLLM's front end, and exports them in the front end's own `/metrics`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvoffload.telemetry import payload
from kvoffload.telemetry.families import Families

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class KVOffloadStats(KVConnectorStats):  # type: ignore[misc]  # the type checker runs without vLLM
    """One message: `data` holds the metric changes since the last message, in the format that `payload` describes."""

    def reset(self) -> None:
        """Remove all changes. Create a new dictionary, because another object may still hold the old one."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVOffloadStats:
        """Add a later message, or another rank's message, to this one."""
        payload.merge(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the values that vLLM's periodic log line shows."""
        return payload.summarize(self.data)

    def is_empty(self) -> bool:
        return not self.data


class KVOffloadPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # the type checker runs without vLLM
    """The catalogue's metrics in one of vLLM's front ends, for all engines it serves."""

    def __init__(self, vllm_config: VllmConfig, *metrics: Any) -> None:  # noqa: ANN401  # see `build_prom_metrics`
        super().__init__(vllm_config, *metrics)
        self._families = Families(*metrics)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self._families.observe(transfer_stats_data, engine_idx)
