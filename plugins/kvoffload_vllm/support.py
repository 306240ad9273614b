"""Decides whether kvoffload supports a vLLM configuration.

An unsupported configuration is refused at the start, so that vLLM never uses a wrong block.

For a prefix hit, vLLM needs blocks of every group except those that it can rebuild (`prefix_cacheable` is False). If
kvoffload cannot copy one of the needed groups, the whole model cannot be offloaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvoffload.model.groups import AttentionKind

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

KINDS = {
    "FullAttentionSpec": AttentionKind.FULL,
    "MLAAttentionSpec": AttentionKind.FULL,
    "SinkFullAttentionSpec": AttentionKind.FULL,
    "SlidingWindowSpec": AttentionKind.SLIDING_WINDOW,
    "SlidingWindowMLASpec": AttentionKind.SLIDING_WINDOW,
    "ChunkedLocalAttentionSpec": AttentionKind.CHUNKED_LOCAL,
    "MambaSpec": AttentionKind.RECURRENT,
}
"""The attention kind of each supported spec class, by the class's exact name.

Other classes are not supported, not even subclasses, because they may reuse or share blocks in a different way.
"""

VERSIONS = "vLLM 0.28 and newer; 0.28, 0.30, 0.32 and 0.33 were run"
"""The vLLM versions with which the connector works."""

NEWEST_RUN = (0, 33)
"""The newest vLLM version with which the connector was run."""

NEEDED = (
    "bind_gpu_block_pool",
    "has_pending_push_work",
    "on_new_request",
    "requires_kv_delivery",
    # Since 0.28; older versions used recurrent states that a hit had not loaded.
    "supports_divergent_local_hybrid_hits",
)
"""The attributes that vLLM's base class for connectors must have."""

_WRAPPER = "kv_cache_specs"  # the attribute of a group's spec that contains a spec for each layer


@dataclass(frozen=True, slots=True)
class Features:
    """What a vLLM version offers to connectors.

    Args:
        reports_failed_loads: whether a connector can report which requests' loads failed. Models with several groups
            recover only from loads reported this way.
        hands_off_states: whether each step says which recurrent states it completes, and in which blocks.
        lacks: attributes that the connector needs and this version does not have.
    """

    reports_failed_loads: bool = True
    hands_off_states: bool = False
    lacks: tuple[str, ...] = ()


def find_features() -> Features:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.core.sched import output

    lacks = tuple(name for name in NEEDED if not hasattr(KVConnectorBase_V1, name))
    reports_failed_loads = hasattr(KVConnectorBase_V1, "get_transfer_results")
    return Features(reports_failed_loads, hasattr(output, "KVConnectorBlockState"), lacks)


def layer_specs(spec: KVCacheSpec) -> tuple[KVCacheSpec, ...]:
    """Return the specs of a group's layers: one spec for all layers, or one spec for each layer."""
    wrapped: dict[str, KVCacheSpec] | None = getattr(spec, _WRAPPER, None)
    return tuple(wrapped.values()) if wrapped else (spec,)


def is_needed_for_hits(group: KVCacheGroupSpec) -> bool:
    """Return whether vLLM needs this group's blocks for a prefix hit."""
    return bool(getattr(group.kv_cache_spec, "prefix_cacheable", True))


def find_problems(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, features: Features) -> list[str]:
    """Return all reasons why this configuration cannot be offloaded. Each reason is a sentence."""
    if features.lacks:
        return [f"this vLLM lacks {', '.join(features.lacks)}; the connector works with {VERSIONS}"]
    groups = kv_cache_config.kv_cache_groups
    problems = [*_check_settings(vllm_config), *_check_tiers(kv_cache_config)]
    for number, group in enumerate(groups):
        if is_needed_for_hits(group):
            problems += _check_group(number, layer_specs(group.kv_cache_spec), features)
    if not any(map(is_needed_for_hits, groups)):
        problems.append("no KV cache of the model is found by its prefix, so there is nothing to offload")
    if len(groups) > 1 and not features.reports_failed_loads:
        problems.append(
            f"the model has {len(groups)} KV cache groups, and this vLLM cannot recover from a failed load of more "
            "than one; use vLLM 0.30 or newer, or a model with one group"
        )
    return problems


def role_problems(role: object) -> Iterator[str]:
    """Yield a problem if vLLM's `kv_role` is not supported. The doctor calls this function before vLLM starts."""
    if role != "kv_both":
        yield f"kv_role is {role!r:.40}; it must be 'kv_both', because blocks are both stored and loaded"


def _check_settings(vllm_config: VllmConfig) -> Iterator[str]:
    yield from role_problems(vllm_config.kv_transfer_config.kv_role)
    caches, model = vllm_config.cache_config.enable_prefix_caching, getattr(vllm_config, "model_config", None)
    yield from option_problems(caches, model, vllm_config.parallel_config)


def option_problems(caches_prefixes: bool, model: object, parallel: object) -> Iterator[str]:
    """Yield each problem with vLLM's options. The doctor calls this function before vLLM starts.

    Args:
        caches_prefixes: whether vLLM's prefix caching is on.
        model: an object with the attributes of vLLM's model configuration.
        parallel: an object with the attributes of vLLM's parallel configuration.
    """
    if not caches_prefixes:
        yield "prefix caching is off, and blocks are found by their prefix; start with --enable-prefix-caching"
    if getattr(model, "enable_sleep_mode", False):
        yield (
            "sleep mode is on, and it takes away the device memory that copies read and write; start without "
            "--enable-sleep-mode"
        )
    yield from _check_ranks(parallel)


def _check_ranks(parallel_config: object) -> Iterator[str]:
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel_config, name, 1)
        if size > 1:
            yield f"{name} is {size}; it must be 1, tensor and pipeline parallelism may be any"
    launcher = getattr(parallel_config, "distributed_executor_backend", None)
    ranks = getattr(parallel_config, "world_size", 1)
    if launcher == "external_launcher" and ranks > 1:
        # Each scheduler gets the reports of only its own worker, and copies end at different times on different ranks.
        yield (
            f"distributed_executor_backend is {launcher!r} with {ranks} ranks: each has its own scheduler, and all "
            "must schedule alike, but their host memories differ; start with mp or ray"
        )


def _check_tiers(kv_cache_config: KVCacheConfig) -> Iterator[str]:
    # Only HiSparse has groups whose KV is on the host, or is rebuilt from another group after a load.
    moved = any(
        getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True)
        for group in kv_cache_config.kv_cache_groups
    )
    if moved or getattr(kv_cache_config, "hisparse_host_num_blocks", None) is not None:
        yield "HiSparse keeps KV on the host itself; switch it off"


def _check_group(number: int, specs: Sequence[KVCacheSpec], features: Features) -> Iterator[str]:
    unknown = sorted({type(spec).__name__ for spec in specs} - KINDS.keys())
    if unknown:
        yield f"KV cache group {number} is of {', '.join(unknown)}; known are {', '.join(KINDS)}"
        return
    if len({(kind_of(spec), spec.block_size, reach_of(spec)) for spec in specs}) > 1:
        yield f"the layers of KV cache group {number} differ in attention kind, block size or window"
    if any(kind_of(spec) is AttentionKind.RECURRENT for spec in specs):
        yield from _check_states(number, specs, features)


def _check_states(number: int, specs: Sequence[KVCacheSpec], features: Features) -> Iterator[str]:
    """Yield a problem if a group's recurrent states cannot be stored.

    They can be stored only where vLLM hands them to the connector, because they are complete only there.
    """
    if not features.hands_off_states:
        yield (
            f"KV cache group {number} holds recurrent (Mamba) states, which this vLLM does not hand to connectors; "
            "use vLLM 0.30 or newer, or a model with attention only"
        )
        return
    modes = sorted({spec.mamba_cache_mode for spec in specs} - {"align"})
    if modes:
        yield (
            f"KV cache group {number} holds recurrent (Mamba) states in mode {', '.join(modes)}, in which vLLM hands "
            "none off; start with --mamba-cache-mode align"
        )


def kind_of(spec: KVCacheSpec) -> AttentionKind:
    """Return a layer's attention kind. The spec's class must be in `KINDS`."""
    return KINDS[type(spec).__name__]


def reach_of(spec: KVCacheSpec) -> int | None:
    """Return the size of the window or chunk in tokens; None for full attention and for recurrent layers.

    If a draft model recomputes tokens, vLLM keeps more tokens than the attention window covers. On a hit, vLLM treats
    all of these tokens as computed, so their blocks must all be loaded, and the returned window includes them.
    """
    kind = kind_of(spec)
    if kind is AttentionKind.SLIDING_WINDOW:
        return int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0))
    return int(spec.attention_chunk_size) if kind is AttentionKind.CHUNKED_LOCAL else None
