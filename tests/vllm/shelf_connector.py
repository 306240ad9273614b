"""A connector that loads blocks from a test's shelf, by block hash, within the step. It stores nothing."""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

from kvoffload_vllm.layout import layout_of_caches
from tests.vllm.stock import engines


class Plan(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not installed where types are checked
    def __init__(self, loads: list[tuple[bytes, int]]) -> None:
        self.loads = loads


class Shelf(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # the same
    content: ClassVar[dict[bytes, list[bytes]]] = {}
    reported: ClassVar[list[tuple[int, int]]] = []  # blocks and tokens of each allocation
    loaded: ClassVar[int] = 0

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._config = kv_cache_config
        self._plan: list[tuple[bytes, int]] = []
        self._first = 0

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        first, count = num_computed_tokens // engines.BLOCK, 0
        last = (request.num_tokens - 1) // engines.BLOCK
        while first + count < last and request.block_hashes[first + count] in self.content:
            count += 1
        self._first = first
        return count * engines.BLOCK, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        (ids,) = blocks.get_block_ids()
        self.reported.append((len(ids), num_external_tokens))
        for place in range(self._first, self._first + num_external_tokens // engines.BLOCK):
            self._plan.append((request.block_hashes[place], ids[place]))

    def build_connector_meta(self, scheduler_output: Any) -> Plan:
        plan, self._plan = Plan(self._plan), []
        return plan

    def register_kv_caches(self, kv_caches: Any) -> None:
        self._layout = layout_of_caches(kv_caches, self._config)

    def start_load_kv(self, forward_context: Any, **kwargs: object) -> None:
        for block_hash, block in self._get_connector_metadata().loads:
            for region, page in zip(self._layout.regions, self.content[block_hash], strict=True):
                ctypes.memmove(region.address + block * region.block_stride, page, len(page))
            Shelf.loaded += 1

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *_: object, **__: object) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None
