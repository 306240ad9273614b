from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffload.model.errors import ConfigError
from kvoffload.model.groups import AttentionKind
from kvoffload.model.ids import BlockKey
from kvoffload_vllm.groups import VllmGroups, find_sharers, vllm_groups
from kvoffload_vllm.progress import KeyMaker
from kvoffload_vllm.support import Features, find_problems
from tests.vllm.adapter.stand_ins import cache_config, full, group, spec, vllm_config, window

LAYERS = {"a": spec("FullAttentionSpec", head_size=64), "b": spec("MLAAttentionSpec", head_size=576)}
PLAIN = Features()
WITH_STATES, ONE_GROUP = Features(hands_off_states=True), Features(reports_failed_loads=False)


def translate(
    *groups: Any, sizes: tuple[int, int] = (16, 16), features: Features = PLAIN, **settings: Any
) -> VllmGroups:
    return vllm_groups(vllm_config(**settings), cache_config(*groups), features=features, sizes=sizes)


def test_the_shape_has_the_engines_numbers() -> None:
    shape = translate(group(full()), sizes=(64, 16)).shape
    assert (shape.ranks, shape.device_blocks, shape.step_tokens, shape.alignment) == (4, 99, 512, 64)
    assert (shape.in_flight_tokens, shape.draft_tokens) == (512, 0)


def test_the_shape_counts_two_steps_in_flight_and_the_tokens_of_a_draft_model() -> None:
    config = vllm_config(draft=SimpleNamespace(num_speculative_tokens=3, use_eagle=lambda: False))
    config.max_concurrent_batches = 2
    shape = vllm_groups(config, cache_config(group(full())), features=PLAIN, sizes=(16, 16)).shape
    assert (shape.in_flight_tokens, shape.draft_tokens) == (1024, 4)


MLA = spec("MLAAttentionSpec")


def with_model(kind: str = "qwen3", heads: int = 2, **settings: Any) -> Any:
    """Return the configuration of a model with this many KV heads in each layer."""
    config = vllm_config(**settings)
    text = SimpleNamespace(model_type=kind)
    config.model_config = SimpleNamespace(hf_text_config=text, get_total_num_kv_heads=lambda: heads)
    config.parallel_config.tensor_parallel_size = 4
    config.parallel_config.distributed_executor_backend = "mp"
    return config


@pytest.mark.parametrize(
    ("config", "sharers"),
    [
        (with_model(), 2),
        (with_model(heads=1), 4),
        (with_model(heads=4), 1),
        (with_model(heads=3), 1),
        (with_model(heads=8), 1),
        (with_model("nemotron-nas"), 1),  # its layers have different numbers of heads
        (with_model(draft=SimpleNamespace(num_speculative_tokens=3, use_eagle=lambda: False)), 1),
    ],
)
def test_more_ranks_than_kv_heads_share_copies_if_all_layers_have_the_same_heads(
    config: Any, sharers: int
) -> None:
    assert find_sharers(config, cache_config(group(full()))) == sharers


@pytest.mark.parametrize(
    ("specs", "parallel", "said", "sharers"),
    [
        ([MLA, spec("SlidingWindowMLASpec", sliding_window=64)], {}, None, 4),
        ([MLA, full()], {}, None, 1),
        ([MLA], {}, 2, 2),  # newer versions of vLLM say it
        ([MLA], {}, 1, 1),
        ([full(), window(64)], {}, 1, 2),  # two KV heads on four ranks
        ([full(), spec("ChunkedLocalAttentionSpec", attention_chunk_size=48)], {}, 1, 1),
        ([full()], {"tensor_parallel_size": 2, "world_size": 2}, 1, 1),
        ([MLA], {"local_world_size": 8, "world_size": 8}, 4, 4),  # two pipeline stages
        ([MLA], {"tensor_parallel_size": 16, "world_size": 16, "local_world_size": 8}, 16, 8),  # two machines
        ([MLA], {"distributed_executor_backend": "ray"}, 4, 1),
        ([MLA], {"decode_context_parallel_size": 2}, 4, 1),
    ],
)
def test_ranks_share_a_copy_if_vllm_says_that_they_have_the_same_kv(
    specs: list[Any], parallel: dict[str, Any], said: int | None, sharers: int
) -> None:
    config, caches = with_model(), cache_config(*map(group, specs))
    for name, value in parallel.items():
        setattr(config.parallel_config, name, value)
    if said is not None:
        caches.kv_tp_replicas = said
    assert find_sharers(config, caches) == sharers


@pytest.mark.parametrize(("shares", "sharers"), [(True, 4), (False, 1)])
def test_the_shape_has_the_ranks_that_share_a_copy_unless_the_setting_is_off(
    shares: bool, sharers: int
) -> None:
    config, caches = with_model(), cache_config(group(MLA))
    found = vllm_groups(config, caches, features=PLAIN, sizes=(16, 16), shares=shares)
    assert found.shape.sharers == sharers


@pytest.mark.parametrize(
    ("one", "kind", "reach"),
    [
        (full(), AttentionKind.FULL, None),
        (spec("MLAAttentionSpec"), AttentionKind.FULL, None),
        (spec("SinkFullAttentionSpec", sink_len=16), AttentionKind.FULL, None),
        (window(80), AttentionKind.SLIDING_WINDOW, 80),
        # For a hit, vLLM also allocates the tokens that it retains before the window, and treats them as computed.
        (window(80, extra_retained_tokens=5), AttentionKind.SLIDING_WINDOW, 85),
        (spec("SlidingWindowMLASpec", sliding_window=64), AttentionKind.SLIDING_WINDOW, 64),
        (spec("ChunkedLocalAttentionSpec", attention_chunk_size=48), AttentionKind.CHUNKED_LOCAL, 48),
        # Without its hybrid cache manager, vLLM keeps all blocks of a layer with window attention.
        (spec("FullAttentionSpec", sliding_window=80), AttentionKind.FULL, None),
        # Layers of one kind may differ in size.
        (spec("UniformTypeKVCacheSpecs", kv_cache_specs=LAYERS), AttentionKind.FULL, None),
    ],
)
def test_each_known_spec_is_translated(one: Any, kind: AttentionKind, reach: int | None) -> None:
    (translated,) = translate(group(one)).shape.groups
    assert (translated.kind, translated.reach_tokens, translated.block_tokens) == (kind, reach, 16)
    assert not translated.has_lookahead


def test_the_last_hash_of_a_block_is_its_key() -> None:
    groups = translate(group(full(32)), group(window(80, 16)), sizes=(32, 8))
    assert groups.hash_ratios == (4, 2)
    keys = KeyMaker(groups.hash_ratios, groups.ids).keys([bytes([n]) for n in range(12)], 0)
    assert [key[0] for key in keys[0]] == [3, 7, 11]
    assert [key[0] for key in keys[1]] == [1, 3, 5, 7, 9, 11]
    # Only in group 0 can a part of a block have a hash.
    assert translate(group(full(32)), group(window(80, 16)), sizes=(32, 16)).partly_hashed == {0: 32}


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"blocks of 16 tokens.*multiple of the 32 of a block hash"):
        translate(group(full()), sizes=(32, 32))


def test_sleep_mode_needs_a_vllm_that_announces_it() -> None:
    config, groups = vllm_config(), cache_config(group(full()))
    config.model_config = SimpleNamespace(enable_sleep_mode=True)
    assert find_problems(config, groups, Features(announces_sleep=True)) == []
    (problem,) = find_problems(config, groups, PLAIN)
    assert problem.startswith("sleep mode is on, and it takes away the device memory")


# -- groups that are left out ---------------------------------------------------------------------------------------


def test_a_group_that_hits_do_not_need_is_left_out() -> None:
    ring = group(spec("CircularBufferSpec", 128, prefix_cacheable=False))
    groups = translate(group(full()), ring, group(window(80)))
    assert groups.ids == (0, 2)
    assert [one.group for one in groups.shape.groups] == [0, 1]


def mamba(mode: str = "align") -> Any:
    return group(spec("MambaSpec", 64, mamba_cache_mode=mode))


MIXED = spec("UniformTypeKVCacheSpecs", kv_cache_specs={"a": window(32), "b": window(48)})
REFUSED = {
    "cross attention": (cache_config(group(full()), group(spec("CrossAttentionSpec"))), "1 is of CrossAtt"),
    "an unknown spec": (
        cache_config(group(full()), group(spec("Odd"))),
        "is of Odd; known are FullAttention",
    ),
    "different windows": (cache_config(group(MIXED)), "differ in attention kind, block size or window"),
    "no cache": (cache_config(), "nothing to offload"),
    "HiSparse on the host": (cache_config(group(full(), host_resident=True)), "HiSparse"),
    "HiSparse without transfers": (cache_config(group(full(), enable_kv_transfer=False)), "HiSparse"),
    "HiSparse's setting": (cache_config(group(full()), hisparse_host_num_blocks=5), "HiSparse"),
    "states, older vLLM": (
        cache_config(group(full()), mamba()),
        "use vLLM 0.30 or newer, or a model with attent",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_cache_that_cannot_be_offloaded_is_refused(case: str) -> None:
    config, said = REFUSED[case]
    (problem,) = find_problems(vllm_config(), config, PLAIN)
    assert said in problem


# -- recurrent states -----------------------------------------------------------------------------------------------


def test_states_are_handed_off_in_one_mode_only() -> None:
    (problem,) = find_problems(vllm_config(), cache_config(group(full()), mamba("all")), WITH_STATES)
    assert "in mode all" in problem
    assert problem.endswith("start with --mamba-cache-mode align")


def test_states_that_are_handed_off_have_keys_that_end_in_vllms_number_of_the_group() -> None:
    left_out = group(spec("Odd", prefix_cacheable=False))
    groups = translate(left_out, mamba(), group(full(64)), features=WITH_STATES, sizes=(64, 16))
    assert groups.shape.groups[0].kind is AttentionKind.RECURRENT
    assert groups.shape.promises.hands_off_states
    assert groups.shape.state_key_ends == {(1).to_bytes(4, "big")}
    keys = [BlockKey(b"hash\0\0\0\1"), BlockKey(b"hash\0\0\0\2"), None]
    assert groups.shape.count_states(keys) == 1


@pytest.mark.parametrize(
    ("groups", "sizes", "changes", "tokens"),
    [
        ((mamba(), group(full(64))), (64, 16), {}, 16),
        ((mamba(), group(full(64))), (64, 64), {}, 0),
        ((group(full(64)), group(full(64))), (64, 16), {}, 0),
        ((mamba(), group(full(32))), (64, 16), {}, 0),
        ((mamba(), group(full(64))), (128, 16), {}, 0),
        ((mamba(), group(full(64)), group(window(80, 64))), (64, 16), {}, 0),
        (
            (mamba(), group(full(64))),
            (64, 16),
            {"draft": SimpleNamespace(use_eagle_block_drop=lambda: True)},
            0,
        ),
    ],
)
def test_a_hit_may_end_inside_a_block_if_vllms_hashes_do(
    groups: Sequence[Any], sizes: tuple[int, int], changes: dict[str, Any], tokens: int
) -> None:
    translated = translate(*groups, features=WITH_STATES, sizes=sizes, **changes)
    assert translated.shape.tail_tokens == tokens
    # The keys of parts of a block count only if hits may end there.
    assert bool(translated.partly_hashed) == (not tokens and sizes[1] < 64)


def test_a_recurrent_group_never_has_lookahead() -> None:
    """With lookahead, hits would need the state one block before their end, and vLLM does not keep it."""
    draft = SimpleNamespace(use_eagle_block_drop=lambda: True)
    groups = translate(mamba(), group(full(64)), features=WITH_STATES, sizes=(64, 16), draft=draft)
    assert ahead(groups) == [False, True]


# -- settings -------------------------------------------------------------------------------------------------------


def test_every_problem_is_listed_at_once() -> None:
    off: dict[str, Any] = {"enable_prefix_caching": False, "prefill_context_parallel_size": 2}
    with pytest.raises(ConfigError) as caught:
        translate(group(spec("Odd")), group(full()), features=ONE_GROUP, kv_role="kv_producer", **off)
    said = (
        "kv_role is 'kv_producer'; it must be 'kv_both'",
        "prefix caching is off, and blocks are found by their prefix; start with --enable-prefix-caching",
        "prefill_context_parallel_size is 2; it must be 1",
        "KV cache group 0 is of Odd; known are ",
        "use vLLM 0.30 or newer, or a model with one group",
    )
    for problem, words in zip(caught.value.problems, said, strict=True):
        assert words in problem


@pytest.mark.parametrize(("ranks", "refusals"), [(1, 0), (2, 1)])
def test_ranks_that_each_have_a_scheduler_are_refused(ranks: int, refusals: int) -> None:
    config = vllm_config(world_size=ranks)
    config.parallel_config.distributed_executor_backend = "external_launcher"
    reported = find_problems(config, cache_config(group(full())), PLAIN)
    assert len(reported) == refusals
    assert all("is 'external_launcher' with 2 ranks" in one for one in reported)


def test_one_group_recovers_on_an_older_vllm_too() -> None:
    assert translate(group(full()), features=ONE_GROUP).ids == (0,)


# -- drafts with lookahead -----------------------------------------------------------------------------------------


def ahead(groups: VllmGroups) -> list[bool]:
    return [one.has_lookahead for one in groups.shape.groups]


def test_a_marked_group_has_lookahead_and_so_does_one_with_the_same_spec() -> None:
    groups = translate(group(full(), is_eagle_group=True), group(window(80)), group(full()))
    assert ahead(groups) == [True, False, True]


@pytest.mark.parametrize("method", ["use_eagle_block_drop", "use_eagle"])
@pytest.mark.parametrize("drops", [True, False])
def test_with_a_draft_model_and_no_marked_group_all_groups_have_lookahead(method: str, drops: bool) -> None:
    draft = SimpleNamespace(**{method: lambda: drops})
    assert ahead(translate(group(full()), group(window(80)), draft=draft)) == [drops, drops]


def test_no_group_has_lookahead_if_vllm_tags_draft_layers_and_found_none() -> None:
    draft = SimpleNamespace(use_eagle_block_drop=lambda: True)
    target = spec("FullAttentionSpec", is_draft=False)
    assert ahead(translate(group(target), group(target), draft=draft)) == [False, False]


# -- drafts that are made from the current step ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "tags", "ids"),
    [
        ("dflash", (False, True), (0,)),
        ("dspark", (True, False), (1,)),
        ("dflash", (None, None), (0, 1)),  # vLLM before 0.33 has no tags
        ("dflash", (False, False), (0, 1)),
        ("eagle3", (False, True), (0, 1)),
        (None, (False, True), (0, 1)),
    ],
)
def test_groups_of_drafts_from_the_current_step_are_left_out(
    method: str | None, tags: tuple[bool | None, ...], ids: tuple[int, ...]
) -> None:
    draft = method and SimpleNamespace(method=method, use_eagle_block_drop=lambda: False)
    groups = [group(spec("FullAttentionSpec", **({} if tag is None else {"is_draft": tag}))) for tag in tags]
    assert translate(*groups, draft=draft).ids == ids


def test_a_group_that_is_left_out_may_be_of_any_kind() -> None:
    draft = SimpleNamespace(method="dspark", use_eagle_block_drop=lambda: False)
    odd = group(spec("Odd", is_draft=True))
    assert translate(group(full()), odd, draft=draft).ids == (0,)


def test_a_group_with_layers_of_both_models_is_offloaded() -> None:
    layers = {
        "target": spec("FullAttentionSpec", is_draft=False),
        "draft": spec("FullAttentionSpec", is_draft=True),
    }
    draft = SimpleNamespace(method="dflash", use_eagle_block_drop=lambda: False)
    both = group(spec("UniformTypeKVCacheSpecs", kv_cache_specs=layers))
    assert translate(both, draft=draft).ids == (0,)
