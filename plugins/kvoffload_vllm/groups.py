"""Translates vLLM's KV cache groups into kvoffload's groups.

kvoffload numbers the offloaded groups from 0. If a group is not offloaded, kvoffload's numbers differ from vLLM's.
vLLM's block tables and block keys contain vLLM's numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvoffload.model.engine import EngineShape, Promises
from kvoffload.model.errors import ConfigError
from kvoffload.model.groups import AttentionKind, GroupSpec
from kvoffload.model.ids import GroupId
from kvoffload_vllm.model_sizes import MODEL_TYPES
from kvoffload_vllm.support import (
    Features,
    draft_tags,
    find_features,
    find_problems,
    is_needed_for_hits,
    kind_of,
    layer_specs,
    reach_of,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec


@dataclass(frozen=True, slots=True)
class VllmGroups:
    """The KV cache groups that are offloaded.

    Args:
        shape: the description of the engine that the core uses.
        ids: vLLM's number for each group.
        hash_tokens: the number of tokens that each block hash of a request covers.
    """

    shape: EngineShape
    ids: tuple[int, ...]
    hash_tokens: int

    @property
    def hash_ratios(self) -> tuple[int, ...]:
        """For each group, the number of block hashes in a block. A block's last hash identifies the block."""
        return tuple(spec.block_tokens // self.hash_tokens for spec in self.shape.groups)

    @property
    def partly_hashed(self) -> dict[int, int]:
        """The number of tokens in a block, by vLLM's group number, for groups whose blocks have several hashes.

        Empty if kvoffload can use the keys that cover only a part of a block.
        """
        if self.shape.tail_tokens:
            return {}
        specs = zip(self.ids, self.shape.groups, strict=True)
        return {number: spec.block_tokens for number, spec in specs if spec.block_tokens > self.hash_tokens}


def vllm_groups(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    *,
    features: Features | None = None,
    sizes: tuple[int, int] | None = None,
    recovers_loads: bool = True,
    shares: bool = True,
) -> VllmGroups:
    """Return the groups to offload, translated from vLLM's groups.

    Args:
        vllm_config: the engine's configuration.
        kv_cache_config: the configuration of the engine's KV cache.
        features: the features of vLLM's connector interface; by default those of the installed vLLM.
        sizes: the tokens in a scheduler block and in a block hash; by default the result of `find_block_sizes`.
        recovers_loads: True if vLLM recomputes the tokens of a failed load; False if vLLM fails the request.
        shares: whether ranks with the same bytes in their blocks share one copy.

    Raises:
        ConfigError: kvoffload does not support the configuration; the message lists every reason.
    """
    features = features or find_features()
    problems = find_problems(vllm_config, kv_cache_config, features)
    if problems:
        raise ConfigError(problems)
    groups = kv_cache_config.kv_cache_groups
    ids = tuple(number for number, group in enumerate(groups) if is_needed_for_hits(vllm_config, group))
    ahead = _with_lookahead(vllm_config, groups)
    specs = tuple(
        _translate_group(vllm_config, GroupId(place), number, groups[number], number in ahead)
        for place, number in enumerate(ids)
    )
    match_tokens, hash_tokens = sizes or find_block_sizes(vllm_config, kv_cache_config)
    _check_sizes(specs, match_tokens, hash_tokens)
    step_tokens = vllm_config.scheduler_config.max_num_batched_tokens
    shape = EngineShape(
        groups=specs,
        ranks=vllm_config.parallel_config.world_size,
        # vLLM counts the null block, which no request uses.
        device_blocks=kv_cache_config.num_blocks - 1,
        step_tokens=step_tokens,
        match_tokens=match_tokens,
        in_flight_tokens=step_tokens * getattr(vllm_config, "max_concurrent_batches", 1),
        draft_tokens=_draft_tokens(vllm_config),
        tail_tokens=_tail_tokens(vllm_config, specs, (match_tokens, hash_tokens), features),
        sharers=find_sharers(vllm_config, kv_cache_config) if shares else 1,
        promises=Promises(recovers_loads=recovers_loads, hands_off_states=features.hands_off_states),
    )
    return VllmGroups(shape, ids, hash_tokens)


_WHOLE = ("MLAAttentionSpec", "SlidingWindowMLASpec")
"""Kinds of layers of which every rank of tensor parallelism has the whole KV: a latent, which each of them computes."""
_BY_HEADS = ("FullAttentionSpec", "SlidingWindowSpec")
"""Kinds of layers of which every rank has the KV of some heads."""


def find_sharers(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Return how many ranks, with consecutive numbers on one machine, have the same bytes in all of their blocks.

    With context parallelism they have different tokens. Only vLLM's multiprocessing executor numbers the ranks of a machine
    consecutively, and starts them as processes that can pass each other open files.
    """
    parallel = vllm_config.parallel_config
    contexts = [getattr(parallel, f"{kind}_context_parallel_size", 1) for kind in ("decode", "prefill")]
    if getattr(parallel, "distributed_executor_backend", None) != "mp" or max(contexts) > 1:
        return 1
    local_ranks = getattr(parallel, "local_world_size", None) or parallel.world_size
    return math.gcd(_replicas(vllm_config, kv_cache_config), local_ranks)


def _replicas(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Return how many consecutive ranks of tensor parallelism have the same KV in every layer."""
    said = getattr(kv_cache_config, "kv_tp_replicas", None)  # of latents only; not in older versions of vLLM
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in layer_specs(group.kv_cache_spec)]
    kinds = {type(spec).__name__ for spec in specs}
    if kinds <= {*_WHOLE}:
        return int(vllm_config.parallel_config.tensor_parallel_size if said is None else said)
    return head_replicas(vllm_config) if kinds <= {*_BY_HEADS} else 1


def head_replicas(vllm_config: VllmConfig) -> int:
    """Return how many consecutive ranks of tensor parallelism have the same KV head, as with more ranks than heads.

    Models in which layers may have different numbers of heads are left out, and so are draft models.
    """
    ranks, model = vllm_config.parallel_config.tensor_parallel_size, vllm_config.model_config
    if vllm_config.speculative_config is not None or model.hf_text_config.model_type not in MODEL_TYPES:
        return 1
    heads = model.get_total_num_kv_heads()
    return 1 if ranks % heads else int(ranks // heads)


def find_block_sizes(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> tuple[int, int]:
    """Return the number of tokens in a block of vLLM's scheduler, and the number of tokens that a block hash covers.

    A hit's length is a multiple of the scheduler's block size.
    """
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    match_tokens, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    return match_tokens, hash_tokens


def _translate_group(
    vllm_config: VllmConfig, place: GroupId, number: int, group: KVCacheGroupSpec, has_lookahead: bool
) -> GroupSpec:
    # `find_problems` has checked that all layers have the same kind, block size and window.
    spec = layer_specs(group.kv_cache_spec)[0]
    key_number = None if number == place else number
    tokens = _block_tokens(vllm_config, group.kv_cache_spec)
    return GroupSpec(place, kind_of(spec), tokens, reach_of(spec), has_lookahead, key_number)


def _block_tokens(vllm_config: VllmConfig, spec: KVCacheSpec) -> int:
    """Return the tokens in a block of a group over all ranks.

    With decode context parallelism, the ranks share the tokens of some groups. In these groups a block of each rank has
    `spec.block_size` tokens, and the blocks with the same id on all ranks together have several times as many.
    """
    ranks = vllm_config.parallel_config.decode_context_parallel_size
    if ranks == 1:
        return int(spec.block_size)
    from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size

    return int(resolve_dcp_kv_block_size(spec, ranks))


def _with_lookahead(vllm_config: VllmConfig, groups: Sequence[KVCacheGroupSpec]) -> frozenset[int]:
    """Return the numbers of the groups in which vLLM drops a hit's last block for a draft model.

    vLLM marks these groups. A group with the same spec as a marked group counts as marked, because vLLM matches groups
    with equal specs together. Recurrent groups do not count: with a draft model, vLLM keeps their state one block earlier
    instead.

    vLLM before 0.33 does not know every draft layer. If it drops blocks but has marked no group, it drops blocks of all
    groups. Newer versions know them, so if none is marked, the draft model has no KV of its own, and nothing is dropped
    here. vLLM still drops a block of its own hits then, and a load brings this block back.
    """
    marked = [group for group in groups if getattr(group, "is_eagle_group", False)]
    if not marked and _drops_for_draft(vllm_config) and not _tags_drafts(groups):
        marked = list(groups)
    return frozenset(
        number
        for number, group in enumerate(groups)
        if any(group.kv_cache_spec == other.kv_cache_spec for other in marked)
        and kind_of(layer_specs(group.kv_cache_spec)[0]) is not AttentionKind.RECURRENT
    )


def _tags_drafts(groups: Sequence[KVCacheGroupSpec]) -> bool:
    return any(tag is not None for group in groups for tag in draft_tags(group))


def _draft_tokens(vllm_config: VllmConfig) -> int:
    """Return for how many tokens after the last one vLLM may allocate space: the drafts, and one more token."""
    drafts = getattr(vllm_config.speculative_config, "num_speculative_tokens", None)
    return 0 if drafts is None else drafts + 1


def _drops_for_draft(vllm_config: VllmConfig) -> bool:
    draft: Any = getattr(vllm_config, "speculative_config", None)
    if draft is None:
        return False
    # vLLM before 0.30 does not have `use_eagle_block_drop`.
    ask = getattr(draft, "use_eagle_block_drop", None) or draft.use_eagle
    return bool(ask())


def _tail_tokens(
    vllm_config: VllmConfig, specs: Sequence[GroupSpec], sizes: tuple[int, int], features: Features
) -> int:
    """Return after a multiple of how many tokens a hit may end inside a block; 0 if vLLM has no such hits.

    vLLM has them if `--prefix-match-unit` makes its hashes finer than a block with a recurrent state. Its own connectors
    also need groups of equal blocks without windows. With lookahead of a draft model, they look for the attention of a
    tail under a later hash, and kvoffload uses no tails.
    """
    match_tokens, hash_tokens = sizes
    kinds = {spec.kind for spec in specs}
    is_plain = kinds == {AttentionKind.FULL, AttentionKind.RECURRENT}
    is_equal = {spec.block_tokens for spec in specs} == {match_tokens}
    is_sharded = vllm_config.parallel_config.decode_context_parallel_size > 1
    if (
        not (is_plain and is_equal and features.hands_off_states)
        or is_sharded
        or _drops_for_draft(vllm_config)
    ):
        return 0
    return hash_tokens if hash_tokens < match_tokens else 0


def _check_sizes(specs: Sequence[GroupSpec], match_tokens: int, hash_tokens: int) -> None:
    problems = [
        f"group {spec.group} has blocks of {spec.block_tokens} tokens, which must be a multiple of the {hash_tokens} of a "
        f"block hash and divide the {match_tokens} of a hit"
        for spec in specs
        if spec.block_tokens % hash_tokens or match_tokens % spec.block_tokens
    ]
    if problems:
        raise ConfigError(problems)
