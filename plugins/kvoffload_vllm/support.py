"""Decides whether kvoffload supports a vLLM configuration.

With an unsupported configuration, the connector refuses to start, so that vLLM never uses a wrong block.

For a prefix hit, vLLM needs blocks of every group except the groups that it rebuilds (`prefix_cacheable` is False) and the
groups of a draft model that reads only the current step. So kvoffload supports a model only if it can copy every needed
group.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from types import ModuleType
from typing import TYPE_CHECKING, Literal

from kvoffload.model.groups import AttentionKind

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig
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

RUN = ("0.28", "0.30", "0.32", "0.33")
"""The vLLM versions with which the connector was run, the oldest first; no older one works."""

VERSIONS = f"vLLM {RUN[0]} and newer; {', '.join(RUN[:-1])} and {RUN[-1]} were run"
"""The vLLM versions with which the connector works. The documents say the same."""

NEEDED = (
    "has_pending_push_work",
    "on_new_request",
    "requires_kv_delivery",
    # Only vLLM 0.28 and newer; older versions used recurrent states that a hit had not loaded.
    "supports_divergent_local_hybrid_hits",
)
"""The attributes that vLLM's base class for connectors must have."""

POOL_HOOKS = ("bind_gpu_block_pool", "bind_kv_cache_manager", "bind_scheduler_context")
"""The hooks by which a vLLM may pass its block pool. One of them is enough.

vLLM 0.28 to 0.33 have the first, 0.30 to 0.33 the second too. A change that is proposed for vLLM has only the third.
"""

FAILURE_HOOKS = ("get_transfer_results", "get_block_ids_with_load_errors")
"""The hooks by which a connector may report failed loads: by request, or by block. One of them is enough."""

FAILED_REQUESTS = "failed_recving"
"""The field of vLLM's `KVConnectorTransferResults` that has the requests whose loads failed."""

SLEEP_HOOKS = ("supports_sleep_mode", "unregister_kv_caches", "restore_kv_caches")
"""The attributes of vLLM's base class for connectors that sleep mode needs; vLLM 0.33 and newer have them."""

ONE_STEP_DRAFTS = ("dflash", "dspark")
"""The methods whose draft model writes its KV from the target's hidden states of the current step.

No step computes a hit's tokens, so vLLM itself has no such KV for them on the device, and a hit must not depend on it.
"""

DRAFTS_RUN = ("draft_model", "eagle", "ngram")
"""The methods of speculative decoding with which the connector was run, by vLLM's names."""

ENCODER_DECODER = (
    "the model is an encoder-decoder: vLLM finds none of its blocks by their prefix, so there is nothing to offload; serve it "
    "without kvoffload"
)

_WRAPPER = "kv_cache_specs"  # the attribute of a group's spec that contains the layers' specs, if they differ


@dataclass(frozen=True, slots=True)
class Features:
    """The features of a vLLM version's connector interface.

    Args:
        reports_failed_loads: whether a connector can report failed loads by request. Without this feature, vLLM cannot
            recover from failed loads of a model with several groups.
        announces_sleep: whether vLLM tells a connector before it releases the KV cache's memory, and after it has
            the memory back.
        hands_off_states: whether vLLM reports, in each step, the completed recurrent states and the states' blocks.
        sizes_shards: whether vLLM says how many tokens a block has over all ranks of decode context parallelism.
        lacks: the attributes that the connector needs but this vLLM lacks. Alternatives are joined by "or".
    """

    reports_failed_loads: bool = True
    hands_off_states: bool = False
    announces_sleep: bool = False
    sizes_shards: bool = False
    lacks: tuple[str, ...] = ()


def release_of(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def find_features() -> Features:
    from vllm.distributed.kv_transfer.kv_connector.v1 import base
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.sched import output

    return features_of(base, output, kv_cache_utils)


def features_of(base: ModuleType, output: ModuleType, utils: ModuleType) -> Features:
    """Return a vLLM's features.

    Args:
        base: the module with the base class for connectors.
        output: the module with the scheduler's output.
        utils: the module with the functions for the KV cache's blocks.
    """
    connector = base.KVConnectorBase_V1
    by_request = hasattr(connector, "get_transfer_results")
    lacks = [name for name in NEEDED if not hasattr(connector, name)]
    choices = [
        hooks for hooks in (POOL_HOOKS, FAILURE_HOOKS) if not any(hasattr(connector, one) for one in hooks)
    ]
    lacks += [" or ".join(hooks) for hooks in choices]
    if by_request and FAILED_REQUESTS not in signature(base.KVConnectorTransferResults).parameters:
        lacks.append(f"KVConnectorTransferResults.{FAILED_REQUESTS}")
    return Features(
        reports_failed_loads=by_request,
        hands_off_states=hasattr(output, "KVConnectorBlockState"),
        announces_sleep=all(hasattr(connector, name) for name in SLEEP_HOOKS),
        sizes_shards=hasattr(utils, "resolve_dcp_kv_block_size"),
        lacks=tuple(lacks),
    )


def keeps_replaced_hashes() -> bool:
    """Return whether vLLM's scheduler keeps the hashes of tokens that a session's next streaming input replaces.

    vLLM 0.28 and 0.30 do, so that a later block of such a session has the hash of another text. vLLM 0.32 deletes them.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    update = getattr(Scheduler, "_update_request_as_session", None)
    return update is not None and "block_hashes" not in update.__code__.co_names


def find_retention(*configs: object) -> int | Literal["unknown"] | None:
    """Return the interval in tokens at which vLLM keeps recurrent states, from the first configuration that has it."""
    name = "prefix_cache_retention_interval"
    return next((getattr(config, name) for config in configs if hasattr(config, name)), "unknown")


def layer_specs(spec: KVCacheSpec) -> tuple[KVCacheSpec, ...]:
    """Return the group's only spec if all layers share it, otherwise a spec for each layer."""
    wrapped: dict[str, KVCacheSpec] | None = getattr(spec, _WRAPPER, None)
    return tuple(wrapped.values()) if wrapped else (spec,)


def draft_tags(group: KVCacheGroupSpec) -> list[bool | None]:
    """Return whether each layer of a group belongs to a draft model. vLLM before 0.33 does not say; then None."""
    return [getattr(spec, "is_draft", None) for spec in layer_specs(group.kv_cache_spec)]


def is_needed_for_hits(vllm_config: VllmConfig, group: KVCacheGroupSpec) -> bool:
    """Return whether a prefix hit needs blocks of a group."""
    if not getattr(group.kv_cache_spec, "prefix_cacheable", True):
        return False
    method = getattr(vllm_config.speculative_config, "method", None)
    return method not in ONE_STEP_DRAFTS or not all(draft_tags(group))


def _lacking(features: Features) -> str:
    return f"this vLLM lacks {', '.join(features.lacks)}; the connector works with {VERSIONS}"


def find_problems(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, features: Features) -> list[str]:
    """Return every reason why kvoffload does not support a configuration. Each reason is a sentence."""
    if features.lacks:
        return [_lacking(features)]
    groups = kv_cache_config.kv_cache_groups
    problems = [*_check_settings(vllm_config, features), *_check_tiers(kv_cache_config)]
    needed = [number for number, group in enumerate(groups) if is_needed_for_hits(vllm_config, group)]
    for number in needed:
        problems += _check_group(number, layer_specs(groups[number].kv_cache_spec), features)
    if not needed:
        problems.append("no KV cache of the model is found by its prefix, so there is nothing to offload")
    if len(groups) > 1 and not features.reports_failed_loads:
        problems.append(
            f"the model has {len(groups)} KV cache groups, and this vLLM cannot recover from a failed load of more "
            "than one; use vLLM 0.30 or newer, or a model with one group"
        )
    return problems


def role_problems(role: object) -> Iterator[str]:
    """Yield a problem if kvoffload does not support a `kv_role`. The doctor calls this function without vLLM."""
    if role != "kv_both":
        yield f"kv_role is {role!r:.40}; it must be 'kv_both', because blocks are both stored and loaded"


def _check_settings(vllm_config: VllmConfig, features: Features) -> Iterator[str]:
    yield from role_problems(vllm_config.kv_transfer_config.kv_role)
    caches, model = vllm_config.cache_config.enable_prefix_caching, getattr(vllm_config, "model_config", None)
    yield from option_problems(caches, vllm_config.parallel_config)
    yield from _check_shards(vllm_config.parallel_config, features)
    yield from _check_sleep(model, features)


def config_problems(vllm_config: VllmConfig, features: Features) -> list[str]:
    """Return the reasons why kvoffload does not support a configuration, before vLLM has made the KV cache's groups."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if features.lacks:
        return [_lacking(features)]
    if model.is_encoder_decoder:
        return [ENCODER_DECODER]
    problems = [*option_problems(cache.enable_prefix_caching, vllm_config.parallel_config)]
    problems += _check_shards(vllm_config.parallel_config, features)
    problems += _check_sleep(model, features)
    if model.is_hybrid:
        problems += _check_modes("the model", {cache.mamba_cache_mode}, features)
    return problems


def option_problems(caches_prefixes: bool, parallel: object) -> Iterator[str]:
    """Yield each problem with vLLM's options. The doctor also calls this function where vLLM is not installed.

    Args:
        caches_prefixes: whether vLLM's prefix caching is on.
        parallel: an object with the attributes of vLLM's parallel configuration.
    """
    if not caches_prefixes:
        yield "prefix caching is off, and blocks are found by their prefix; start with --enable-prefix-caching"
    yield from _check_ranks(parallel)


def _check_sleep(model: object, features: Features) -> Iterator[str]:
    if getattr(model, "enable_sleep_mode", False) and not features.announces_sleep:
        yield (
            "sleep mode is on, and it takes away the device memory that copies read and write; start without "
            "--enable-sleep-mode, or use vLLM 0.33 or newer, which tells connectors in time"
        )


def _check_shards(parallel_config: ParallelConfig, features: Features) -> Iterator[str]:
    size = parallel_config.decode_context_parallel_size
    if size > 1 and not features.sizes_shards:
        yield (
            f"decode_context_parallel_size is {size}, and this vLLM does not say how many tokens a block then has; use "
            "vLLM 0.29 or newer, or set it to 1"
        )


def _check_ranks(parallel_config: object) -> Iterator[str]:
    size = getattr(parallel_config, "prefill_context_parallel_size", 1)
    if size > 1:
        yield (
            f"prefill_context_parallel_size is {size}; it must be 1, tensor, pipeline and decode context parallelism may "
            "be any"
        )
    launcher = getattr(parallel_config, "distributed_executor_backend", None)
    ranks = getattr(parallel_config, "world_size", 1)
    if launcher == "external_launcher" and ranks > 1:
        # Each scheduler gets only its own worker's reports, but copies end at different times on different ranks.
        yield (
            f"distributed_executor_backend is {launcher!r} with {ranks} ranks: each has its own scheduler, and all "
            "must schedule alike, but their host memories differ; start with mp or ray"
        )


def _check_tiers(kv_cache_config: KVCacheConfig) -> Iterator[str]:
    # Only HiSparse keeps a group's KV on the host, or rebuilds a group's KV from another group after a load.
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
    modes = {spec.mamba_cache_mode for spec in specs}
    yield from _check_modes(f"KV cache group {number}", modes, features)


def _check_modes(holder: str, modes: set[str], features: Features) -> Iterator[str]:
    """Yield a problem if vLLM does not hand the holder's recurrent states to connectors when they are complete."""
    if not features.hands_off_states:
        yield (
            f"{holder} holds recurrent (Mamba) states, which this vLLM does not hand to connectors; "
            "use vLLM 0.30 or newer, or a model with attention only"
        )
        return
    others = sorted(modes - {"align"})
    if others:
        yield (
            f"{holder} holds recurrent (Mamba) states in mode {', '.join(others)}, in which vLLM hands "
            "none off; start with --mamba-cache-mode align"
        )


def kind_of(spec: KVCacheSpec) -> AttentionKind:
    """Return a layer's attention kind. The class of `spec` must be in `KINDS`."""
    return KINDS[type(spec).__name__]


def reach_of(spec: KVCacheSpec) -> int | None:
    """Return the size of a layer's window or chunk in tokens; None for full attention and for recurrent layers.

    The window includes the tokens that vLLM keeps beyond the attention window for a draft model. After a hit, vLLM
    treats these tokens as computed, so kvoffload must load their blocks too.
    """
    kind = kind_of(spec)
    if kind is AttentionKind.SLIDING_WINDOW:
        return int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0))
    return int(spec.attention_chunk_size) if kind is AttentionKind.CHUNKED_LOCAL else None
