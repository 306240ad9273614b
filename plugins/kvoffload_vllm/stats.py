"""Sends kvoffload's metrics from the scheduler side to vLLM's front end, which exports them in vLLM's `/metrics`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvoffload.telemetry import payload
from kvoffload.telemetry.families import Families

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class KVOffloadStats(KVConnectorStats):  # type: ignore[misc]  # the type checker runs without vLLM
    """A message to vLLM's front end. `data` contains the changes of the metrics since the last message.

    `kvoffload.telemetry.payload` describes the format of `data`.
    """

    def reset(self) -> None:
        """Replace `data` with an empty dictionary; other objects may still use the old dictionary."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVOffloadStats:
        """Add the changes of a later message, or of another rank's message, to `data`."""
        payload.merge(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the values for vLLM's periodic log line."""
        return payload.summarize(self.data)

    def is_empty(self) -> bool:
        return not self.data


class KVOffloadPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # the type checker runs without vLLM
    """Exports the metrics of all engines that belong to one of vLLM's front ends."""

    def __init__(self, vllm_config: VllmConfig, *metrics: Any) -> None:  # noqa: ANN401  # see `build_prom_metrics`
        super().__init__(vllm_config, *metrics)
        self._families = Families(*metrics)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self._families.observe(transfer_stats_data, engine_idx)
