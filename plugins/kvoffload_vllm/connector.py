"""The connector class that vLLM loads.

The class has the hooks of the scheduler side and of the worker side, but each instance serves only one side.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from kvoffload.model.wire import Tier
from kvoffload_vllm.assembly import start_scheduler, start_worker
from kvoffload_vllm.layout import layout_of_caches, meaning_of_caches, preferred_layout
from kvoffload_vllm.metadata import KVOffloadMetadata
from kvoffload_vllm.places import PLACES
from kvoffload_vllm.scheduler import VllmScheduler
from kvoffload_vllm.stats import KVOffloadPromMetrics, KVOffloadStats
from kvoffload_vllm.worker import VllmWorker

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
        PromMetric,
        PromMetricT,
    )
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # vLLM before 0.32 does not distinguish hits by their source
    CacheHitSource = None


class KVOffloadConnector(VllmScheduler, VllmWorker, KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # the type checker runs without vLLM
    """Keeps computed KV blocks in host memory and loads them back.

    Raises:
        ConfigError: the settings, the model or this vLLM version cannot be used; the message lists every problem.
    """

    requires_kv_delivery = False
    """False, because the connector is a cache: a request's output never depends on whether blocks were stored."""

    supports_divergent_local_hybrid_hits = False

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        self._vllm_cache_config = kv_cache_config
        self._bad_blocks: set[int] = set()
        if role is KVConnectorRole.SCHEDULER:
            start_scheduler(self, vllm_config, kv_cache_config)
        else:
            start_worker(self, vllm_config, kv_cache_config)

    # -- worker side --------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        layers = self._vllm_config.compilation_config.static_forward_context
        meaning = meaning_of_caches(kv_caches, self._vllm_cache_config, layers)
        self.register(replace(layout_of_caches(kv_caches, self._vllm_cache_config), meaning=meaning))

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, KVOffloadMetadata), connector_metadata
        self.bind(connector_metadata)

    def clear_connector_metadata(self) -> None:
        self.clear()
        super().clear_connector_metadata()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: vLLM schedules a request only after its load has ended, so no layer has to wait."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: object
    ) -> None:
        """Do nothing: after the forward pass, kvoffload starts one copy that stores all layers of a block."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose loads ended. Only vLLM versions before 0.30 call this method.

        These versions learn only from `get_block_ids_with_load_errors` which loads failed.
        """
        received = self.take_received()
        self._bad_blocks = received.bad_blocks
        return None, received.finished or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> base.KVConnectorTransferResults:
        received = self.take_received()
        return base.KVConnectorTransferResults(
            finished_recving=received.finished, failed_recving=received.failed
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad_blocks, self._bad_blocks = self._bad_blocks, set()
        return bad_blocks

    # -- scheduler side -----------------------------------------------------------------------------------------

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Return how many of the tokens came from each tier. vLLM versions before 0.32 do not call this method."""
        fetched = self.offload.fetched_tokens(request.request_id, num_external_tokens)
        counts = {Tier.HOST: num_external_tokens - sum(fetched.values()), **fetched}
        return {CacheHitSource(PLACES[tier].source): tokens for tier, tokens in counts.items() if tokens}

    # -- both sides ---------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        half = VllmScheduler if self._role is KVConnectorRole.SCHEDULER else VllmWorker
        half.close(self)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Return True. vLLM versions before 0.33 do not call this method; there, the connector refuses sleep mode."""
        return True

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        return preferred_layout(vllm_config)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return KVOffloadStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return KVOffloadPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
