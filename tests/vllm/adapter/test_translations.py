"""Tests the translations with the installed vLLM's own classes for specs and placements."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffload.model.groups import AttentionKind
from tests.keys import block_key
from tests.vllm.adapter.stand_ins import vllm_config
from tests.vllm.adapter.test_layout import page
from tests.vllm.engine_rig import MARKS
from tests.vllm.stock import engines

pytestmark = MARKS

BLOCKS = 7
IMPORT = """
import sys
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.plugins import load_general_plugins

load_general_plugins()
connector = KVConnectorFactory.get_connector_class_by_name("KVOffloadConnector")
print(connector.__module__, *[name for name in sys.modules if name.startswith(("kvoffload.cli", "kvoffload.gpu_check"))])
"""


def test_vllm_does_not_import_the_command_or_the_gpu_check() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.splitlines()[-1].split() == ["kvoffload_vllm.connector"]


def specs() -> Any:
    from vllm.v1 import kv_cache_interface

    return kv_cache_interface


def attention(name: str = "FullAttentionSpec", **fields: Any) -> Any:
    import torch

    values = {"block_size": 32, "num_kv_heads": 2, "head_size": 16, "dtype": torch.float16, **fields}
    return getattr(specs(), name)(**values)


def grouped(*members: Any) -> list[Any]:
    """Return one KV cache group with two layers for each spec."""
    return [
        specs().KVCacheGroupSpec([f"{number}.{layer}" for layer in range(2)], spec)
        for number, spec in enumerate(members)
    ]


# -- placements -----------------------------------------------------------------------------------------------------


def planned(layout: Any, groups: list[Any]) -> Any:
    config = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            num_gpu_blocks_override=BLOCKS,
            prefix_cache_retention_interval=None,
        ),
        model_config=SimpleNamespace(max_model_len=64),
        max_in_flight_tokens=64,
    )
    return engines.cache_planning().get_kv_cache_config_from_groups(config, groups, 1 << 24)


def mixed_pages() -> list[Any]:
    layers = {
        "0.0": attention(),
        "0.1": attention(head_size=48),
        "0.2": attention("MLAAttentionSpec", num_kv_heads=1),
    }
    wrapped = specs().UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs=layers)
    return [specs().KVCacheGroupSpec(list(layers), wrapped)]


LAYER_OUTERMOST = ("LBHNC", "LBNHC")
BLOCK_OUTERMOST = ("BLHNC", "BLNHC")
PLACEMENTS = [
    # vLLM supports different page sizes and split blocks only in layouts that keep a block's page in one piece.
    *(
        (layout, model, 32)
        for layout in (*LAYER_OUTERMOST, *BLOCK_OUTERMOST)
        for model in ("full", "hybrid", "mixed")
    ),
    *((layout, model, 32) for layout in ("LHBNC", "BHLNC") for model in ("full", "hybrid", "latent")),
    *((layout, model, 16) for layout in LAYER_OUTERMOST for model in ("full", "hybrid", "mixed", "latent")),
]


@pytest.mark.parametrize(("layout_name", "model", "kernel_tokens"), PLACEMENTS)
def test_every_placement_is_described(layout_name: str, model: str, kernel_tokens: int) -> None:
    import torch

    kv_cache_layout = pytest.importorskip("vllm.v1.kv_cache_layout", reason="needs placed tensors, vLLM 0.29")
    from vllm.v1.worker.utils import allocate_kv_cache

    from kvoffload_vllm.layout import layout_of_caches

    models: dict[str, Callable[[], list[Any]]] = {
        "full": lambda: grouped(attention()),
        "hybrid": lambda: grouped(attention(), *[attention("SlidingWindowSpec", sliding_window=40)] * 3),
        "mixed": mixed_pages,
        "latent": lambda: grouped(attention("MLAAttentionSpec", num_kv_heads=1)),
    }
    groups = models[model]()
    chosen = kv_cache_layout.KVCacheLayout[layout_name]
    config = planned(chosen, groups)
    caches = allocate_kv_cache(config, torch.device("cpu"), chosen, [kernel_tokens] * len(groups))
    layout = layout_of_caches(caches, config)
    assert layout.blocks == BLOCKS
    for view in caches.values():
        assert view.shape[0] == BLOCKS * 32 // kernel_tokens
        check_written_blocks(layout, view, 32 // kernel_tokens)


def check_written_blocks(layout: Any, view: Any, ratio: int) -> None:
    """Check that a block's page has all bytes that a layer writes into the block, and no bytes of other blocks."""
    for block in range(BLOCKS):
        before = [page(layout, other) for other in range(BLOCKS)]
        part = view[block * ratio : (block + 1) * ratio]
        part.fill_(block + 1.5)
        written = struct.pack("<e", block + 1.5)
        after = [page(layout, other) for other in range(BLOCKS)]
        assert [one for one in range(BLOCKS) if before[one] != after[one]] == [block]
        assert sum(a != b for a, b in zip(before[block], after[block], strict=True)) <= part.numel() * 2
        assert after[block].count(written) >= part.numel()
        part.zero_()


# -- groups ---------------------------------------------------------------------------------------------------------


def engine() -> Any:
    made = vllm_config(world_size=2)
    sizes = {"prefix_match_unit": None, "hash_block_size": None, "block_size": 32}
    made.cache_config = SimpleNamespace(enable_prefix_caching=True, **sizes)
    made.parallel_config.prefill_context_parallel_size = 1
    return made


def cache_config(*members: Any) -> Any:
    return specs().KVCacheConfig(num_blocks=10, kv_cache_tensors=[], kv_cache_groups=grouped(*members))


def test_groups_of_real_specs_are_translated() -> None:
    from kvoffload_vllm.groups import vllm_groups
    from kvoffload_vllm.support import Features

    groups = vllm_groups(
        engine(),
        cache_config(
            attention(),
            attention("SlidingWindowSpec", sliding_window=80, extra_retained_tokens=2, block_size=64),
            attention("ChunkedLocalAttentionSpec", attention_chunk_size=96),
            attention("MLAAttentionSpec"),
        ),
        features=Features(),
    )
    kinds = [(one.kind, one.block_tokens, one.reach_tokens) for one in groups.shape.groups]
    assert kinds == [
        (AttentionKind.FULL, 32, None),
        (AttentionKind.SLIDING_WINDOW, 64, 82),
        (AttentionKind.CHUNKED_LOCAL, 32, 96),
        (AttentionKind.FULL, 32, None),
    ]
    assert groups.hash_ratios == (1, 2, 1, 1)
    assert (groups.shape.match_tokens, groups.hash_tokens) == (64, 32)
    assert (groups.shape.ranks, groups.shape.device_blocks) == (2, 9)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("SlidingWindowSpec", {"sliding_window": 80}),
        ("SlidingWindowSpec", {"sliding_window": 80, "extra_retained_tokens": 40}),
        ("ChunkedLocalAttentionSpec", {"attention_chunk_size": 96}),
    ],
)
def test_a_hit_needs_the_blocks_that_vllms_manager_keeps(name: str, fields: dict[str, int]) -> None:
    from vllm.v1.core import single_type_kv_cache_manager as managers

    from kvoffload_vllm.groups import vllm_groups

    one = attention(name, **fields)
    manager = object.__new__(getattr(managers, name.replace("Spec", "Manager")))
    manager.sliding_window = fields.get("sliding_window")
    manager.extra_retained_tokens = fields.get("extra_retained_tokens", 0)
    manager.attention_chunk_size = fields.get("attention_chunk_size")
    (ours,) = vllm_groups(engine(), cache_config(one)).shape.groups
    for length in range(0, 640, 16):
        assert ours.first_needed_token(length) == manager.get_num_skipped_tokens(length)


def test_every_spec_of_vllm_is_known_or_refused_on_purpose() -> None:
    from kvoffload_vllm.support import KINDS

    refused = {"RSWASpec", "HiddenStateCacheSpec", "CrossAttentionSpec", "EncoderOnlyAttentionSpec"}
    left_out = {"CircularBufferSpec"}
    hisparse = {"HiSparseHotSpec", "HiSparseResidentSpec"}
    bases = {"KVCacheSpec", "AttentionSpec", "KVCacheGroupSpec", "KpoolTailSpec"}
    names = {name for name in vars(specs()) if name.endswith("Spec")}
    assert names <= KINDS.keys() | refused | left_out | hisparse | bases


def test_keys_equal_vllms_own() -> None:
    from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

    from kvoffload.model.ids import GroupId

    for number in (0, 3, 300):
        ours = block_key(b"hash", GroupId(number))
        assert make_block_hash_with_group_id(BlockHash(b"hash"), number) == ours


# -- inside a MultiConnector ----------------------------------------------------------------------------------------


def test_the_classes_that_the_connector_inherits_share_no_name() -> None:
    """The connector inherits from all three classes, so a shared name would override a method."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    from kvoffload_vllm.scheduler import VllmScheduler
    from kvoffload_vllm.worker import VllmWorker

    def names(half: Any) -> set[str]:
        return {name for name in (*vars(half), *half.__init__.__code__.co_names) if name[:2] != "__"}

    ours, theirs = names(VllmScheduler), names(VllmWorker)
    assert ours & theirs == {"offload", "_closed", "close"}
    private = {name for name in (ours | theirs) if name.startswith("_")}
    assert private.isdisjoint(names(KVConnectorBase_V1))


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize(("outer", "inner"), [("recompute", "fail"), ("fail", "recompute")])
def test_the_policy_for_failed_loads_is_the_outermost_connectors(
    depth: int, outer: str, inner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import KVTransferConfig, set_current_vllm_config
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from kvoffload_vllm.assembly import find_failure_policy

    policies: list[str] = []
    monkeypatch.setattr(
        "kvoffload_vllm.connector.start_worker",
        lambda _, given, __: policies.append(find_failure_policy(given)),
    )
    config: dict[str, Any] = {
        "kv_connector": "KVOffloadConnector",
        "kv_connector_module_path": "kvoffload_vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": inner,
    }
    for _ in range(depth):
        extra = {"connectors": [config]}
        config = {**config, "kv_connector": "MultiConnector", "kv_connector_extra_config": extra}
        config.pop("kv_connector_module_path", None)
    given = engine()
    given.kv_transfer_config = KVTransferConfig(**{**config, "kv_load_failure_policy": outer})
    given.scheduler_config.disable_hybrid_kv_cache_manager = True
    with set_current_vllm_config(given):  # vLLM's worker sets this context too
        KVConnectorFactory.create_connector(given, KVConnectorRole.WORKER, cache_config(attention()))
    assert policies == [outer]
