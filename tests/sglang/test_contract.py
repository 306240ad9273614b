from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvoffload.model.errors import ConfigError
from tests.captured_logs import capture_logs
from tests.remote.servers import Bucket

if TYPE_CHECKING:
    import torch

    from kvoffload_sglang.storage import KVOffloadStorage

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

PAGE, PAGES = 4, 8
KEYS = [hashlib.sha256(b"%d" % number).hexdigest() for number in range(PAGES)]
Start = Callable[..., "KVOffloadStorage"]


def attention(layout: str = "page_first", heads: int = 2, dtype: str = "float32") -> Any:
    """Return SGLang's host pool of an attention model with two layers. The pool holds `2 * PAGES` pages."""
    import torch
    from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    kind, tokens = getattr(torch, dtype), PAGE * PAGES
    keys, values = (tuple(torch.zeros(tokens, heads, 8, dtype=kind) for _ in range(2)) for _ in "kv")
    pointers = {
        f"{name}_data_ptrs": torch.tensor([each.data_ptr() for each in layers], dtype=torch.uint64)
        for name, layers in (("k", keys), ("v", values))
    }
    buffers = KVBuffers(k=keys, v=values, layout=KVBufferLayout.NHD, **pointers)
    shape = {"page_size": PAGE, "head_num": heads, "head_dim": 8, "v_head_dim": 8, "dtype": kind}
    info = MHABufferInfo(buffers=buffers, device=torch.device("cpu"), **shape)
    size = {"device_capacity_tokens": tokens, "start_layer": 0, "end_layer": 2}
    return MHATokenToKVPoolHost(info, 2.0, 0, PAGE, layout, pin_memory=False, **size)


def states() -> Any:
    """Return SGLang's host pool of recurrent states, with one state per page."""
    import torch
    from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

    info = MambaStateBufferInfo(temporal=torch.zeros(2, PAGES, 3, 5), conv=(torch.zeros(2, PAGES, 6),))
    return MambaPoolHost(info, 2.0, 0, device_capacity=PAGES, pin_memory=False, layout="page_first")


def fill(pool: Any, seed: int) -> None:
    import torch

    buffers = pool.kv_buffer if isinstance(pool.kv_buffer, list | tuple) else [pool.kv_buffer]
    for number, buffer in enumerate(buffers):
        buffer.normal_(generator=torch.Generator().manual_seed(seed + number))


def places(pool: Any, first: int, count: int = PAGES) -> torch.Tensor:
    """Return the positions of all tokens in `count` pages of a pool, from page `first` on."""
    import torch

    return torch.arange(first * pool.page_size, (first + count) * pool.page_size)


def pages(pool: Any, first: int, count: int = PAGES) -> list[torch.Tensor]:
    starts = places(pool, first, count)[:: pool.page_size].tolist()
    return [pool.get_data_page(start).clone() for start in starts]


def are_equal(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return all(bool((one == other).all()) for one, other in zip(some, others, strict=True))


@pytest.fixture(scope="session")
def settings(model: Path) -> dict[str, Any]:
    from sglang.srt.server_args import ServerArgs

    server = ServerArgs(model_path=str(model), device="cpu", skip_tokenizer_init=True)
    server.resolve_once()
    return dict(server.resolved_dict())


@pytest.fixture
def start(settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Return a function that starts a backend, by default with its disk in `tmp_path`.

    The function takes the attention pool or all pools, our settings, SGLang's settings, and the rank's arguments.
    """
    from msgspec.structs import fields
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
    from sglang.srt.server_args import ServerArgs

    from kvoffload_sglang import storage
    from kvoffload_sglang.identity import Engine
    from sglang_cpu_ops.patient import PatientStorage

    monkeypatch.setattr("kvoffload_sglang.identity.process_began_ns", lambda: None)
    namespaces = {each._NS_PATH: tuple(one.name for one in fields(each)) for each in ServerArgs._NAMESPACES}
    alone: dict[str, Any] = dict.fromkeys(("tp_rank", "pp_rank", "attn_cp_rank"), 0)
    alone |= dict.fromkeys(("tp_size", "pp_size", "attn_cp_size"), 1)
    alone |= dict.fromkeys(("is_mla_model", "enable_storage_metrics", "is_page_first_layout"), False)
    with ExitStack() as running:

        def begin(
            pools: Any,
            ours: dict[str, object] | None = None,
            sglang: dict[str, Any] | None = None,
            **rank: Any,
        ) -> KVOffloadStorage:
            pools = pools if isinstance(pools, dict) else {"kv": pools}
            extra = {"interface_v1": 1, "disk_bytes": "1MiB", **(ours or {"disk_path": str(tmp_path)})}
            config = HiCacheStorageConfig(**{**alone, "model_name": "model", "extra_config": extra, **rank})
            engine = Engine({**settings, **(sglang or {})}, namespaces, config, 0, "this one")
            monkeypatch.setattr(storage, "this_engine", lambda _: engine)
            made = PatientStorage(config, {})
            running.callback(made.close)
            made.register_mem_pool_host(pools["kv"])
            for name, pool in pools.items():
                made.register_mem_host_pool_v2(pool, PoolName(name))
            made.on_host_pools_registered()
            assert all(cache.wait_open(20) for cache in made._caches.values())
            return made

        yield begin


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
def test_in_every_layout_pages_can_be_read_into_other_positions(start: Start, layout: str) -> None:
    pool = attention(layout)
    fill(pool, 1)
    written, others = pages(pool, 0), pages(pool, PAGES)
    backend = start(pool)
    assert backend.batch_set_v1(KEYS, places(pool, 0)) == [True] * PAGES
    backend.close()
    backend = start(pool)
    assert backend.batch_exists([*KEYS, "00"]) == PAGES
    assert backend.batch_get_v1(KEYS[:5], places(pool, PAGES, 5)) == [True] * 5
    assert are_equal(pages(pool, PAGES), [*written[:5], *others[5:]])
    assert are_equal(pages(pool, 0), written)


def test_metrics_that_raise_end_with_one_line(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvoffload_sglang.exported import Exported

    def fail(_: Exported) -> None:
        raise ValueError("no metrics")

    monkeypatch.setattr(Exported, "update", fail)
    backend = start(attention(), enable_storage_metrics=True)
    with capture_logs() as lines:
        backend.get_stats()
        backend.get_stats()
    assert [line["error"] for line in lines if line["event"] == "observer_removed"] == [
        "ValueError('no metrics')"
    ]


def test_a_hit_ends_at_the_last_page_with_a_state_and_a_window(start: Start) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    pools = {"kv": attention(), "mamba": states(), "swa": attention("layer_first")}
    for seed, pool in enumerate(pools.values()):
        fill(pool, seed)
    backend = start(pools)

    def transfer(name: PoolName, numbers: Sequence[int], first: int = 0) -> PoolTransfer:
        keys = [KEYS[number] for number in numbers]
        indices = places(pools[name.value], first, len(keys))
        return PoolTransfer(name, indices, None, keys, PoolHitPolicy.TRAILING_PAGES)

    assert all(backend.batch_set_v1(KEYS[:7], places(pools["kv"], 0, 7)))
    state, window = transfer(PoolName.MAMBA, [1, 3, 5]), transfer(PoolName.SWA, [2, 3, 4])
    assert backend.batch_set_v2([state, window]) == {"mamba": [True] * 3, "swa": [True] * 3}

    found = backend.batch_exists_v2(KEYS, [transfer(PoolName.MAMBA, [7]), transfer(PoolName.SWA, [6, 7])])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, [4])
    assert found.extra_pool_hit_pages == {"kv": 7, "mamba": 6, "swa": 5}
    every = PoolTransfer(PoolName.SWA, None, None, KEYS, PoolHitPolicy.ALL_PAGES)
    assert backend.batch_exists_v2(KEYS, [every]).kv_hit_pages == 0
    assert backend.batch_exists_v2(KEYS).restorable_prefix_pages == list(range(1, 8))

    wanted = [transfer(PoolName.MAMBA, [3], PAGES), transfer(PoolName.SWA, [2, 3, 0], PAGES)]
    assert backend.batch_get_v2(wanted) == {"mamba": [True], "swa": [True, True, False]}
    assert are_equal(pages(pools["mamba"], PAGES, 1), pages(pools["mamba"], 1, 1))
    assert are_equal(pages(pools["swa"], PAGES, 2), pages(pools["swa"], 0, 2))


def test_only_the_same_kv_is_found(start: Start, tmp_path: Path, model: Path) -> None:
    """With one change, a backend finds no page; without a change, the next backend still finds all pages."""
    first = start(attention())
    assert all(first.batch_set_v1(KEYS, places(attention(), 0)))
    first.close()
    other = shutil.copytree(model, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rope_theta": 12345.0}))
    pool, named = attention(), {"disk_path": str(tmp_path), "weights_id": "v2"}
    changes: dict[str, tuple[Any, dict[str, Any]]] = {
        "weights": (pool, {"sglang": {"model_path": str(other)}}),
        "a name for the weights": (pool, {"ours": named}),
        "layout": (attention("page_first_direct"), {}),
        "type": (attention(dtype="float16"), {}),
        "heads": (attention(heads=4), {}),
        "rank": (pool, {"tp_rank": 1, "tp_size": 2}),
        "size": (pool, {"tp_size": 2}),
        "stage": (pool, {"pp_rank": 1, "pp_size": 2}),
        "quantization": (pool, {"sglang": {"quantization": "fp8"}}),
        "attention backend": (pool, {"sglang": {"attention_backend": "other"}}),
    }
    for change, (changed, arguments) in changes.items():
        backend = start(changed, **arguments)
        assert backend.batch_exists(KEYS) == 0, change
        backend.close()
    same = start(pool, sglang={"port": 1, "mem_fraction_static": 0.1, "max_running_requests": 3})
    assert same.batch_exists(KEYS) == PAGES


def test_only_one_rank_writes_replicated_kv_and_all_ranks_find_it_in_the_store(
    start: Start, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.reach(monkeypatch)
    ours: dict[str, object] = {"remote_url": f"{bucket.url}/ranks"}
    pools = [attention() for _ in range(2)]
    for seed, pool in enumerate(pools):
        fill(pool, seed)
    writer, reader = (
        start(pool, ours, tp_rank=rank, tp_size=2, is_mla_model=True) for rank, pool in enumerate(pools)
    )
    assert all(writer.batch_set_v1(KEYS, places(pools[0], 0)))
    assert reader.batch_exists(KEYS) == PAGES
    assert all(reader.batch_get_v1(KEYS, places(pools[1], 0)))
    assert are_equal(pages(pools[0], 0), pages(pools[1], 0))
    with pytest.raises(ConfigError, match="use remote_url only"):
        start(pools[0], tp_size=2, is_mla_model=True)


@pytest.mark.parametrize(
    ("sglang", "problem"),
    [
        ({"enable_lora": True}, "LoRA is on"),
        ({"load_format": "dummy"}, "load_format is 'dummy'; set weights_id"),
        ({"custom_weight_loader": ["a.b"]}, "custom_weight_loader is set; set weights_id"),
    ],
)
def test_kv_that_no_other_process_could_find_is_refused(
    start: Start, tmp_path: Path, sglang: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        start(attention(), sglang=sglang)
    assert not list(tmp_path.iterdir())


def test_a_pool_that_is_registered_too_late_or_has_no_addresses_is_refused(start: Start) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolName

    backend = start(attention())
    with pytest.raises(ConfigError, match="the draft pool after the storage backend was attached"):
        backend.register_mem_host_pool_v2(attention(), PoolName.DRAFT)
    pool = attention()
    pool.layout = "of tomorrow"
    with pytest.raises(ConfigError, match="kv pool in the layout 'of tomorrow' has no addresses"):
        start(pool)


def test_if_indices_do_not_match_the_keys_nothing_is_copied_and_one_line_says_so(start: Start) -> None:
    pool = attention()
    backend = start(pool)
    with capture_logs() as lines:
        assert backend.batch_set_v1(KEYS, places(pool, 0, 3)) == [False] * PAGES
        assert backend.batch_get_v1(KEYS, places(pool, 0, 3)) == [False] * PAGES
        assert backend.batch_set_v1([], places(pool, 0, 0)) == []
        assert backend.batch_exists(KEYS) == 0
    assert [line["reason"] for line in lines] == ["8 keys of 4 tokens came with 12 positions"]


TEXT = "a key is of the type str, not bytes"
ODD_KEYS: dict[str, tuple[Any, str]] = {
    "empty": ("", "a key has 0 bytes, not 1 to 64"),
    "65 bytes": ("00" * 65, "a key has 65 bytes, not 1 to 64"),
    "no digits": ("page 1", TEXT),
    "a suffix": (f"{KEYS[0]}_k", TEXT),
    "capitals": (KEYS[0].upper(), TEXT),
    "a space": (f"{KEYS[0][:2]} {KEYS[0][2:]}", TEXT),
    "none": (None, "a key is of the type NoneType, not bytes"),
}


@pytest.mark.parametrize(("key", "reason"), ODD_KEYS.values(), ids=ODD_KEYS)
def test_a_key_that_is_no_digest_costs_only_itself_and_one_line(start: Start, key: str, reason: str) -> None:
    pool = attention()
    fill(pool, 1)
    backend, keys = start(pool), [KEYS[0], key, KEYS[1]]
    with capture_logs() as lines:
        for _ in range(2):
            assert backend.batch_set_v1(keys, places(pool, 0, 3)) == [True, False, True]
            assert backend.batch_exists(keys) == 1
            assert backend.batch_get_v1(keys, places(pool, PAGES, 3)) == [True, False, True]
    assert [(line["event"], line["reason"]) for line in lines] == [("tier_call_refused", reason)]
    restored, written = pages(pool, PAGES, 3), pages(pool, 0, 3)
    assert are_equal(restored[::2], written[::2])
    assert backend.batch_exists(KEYS) == 2


def test_a_pool_that_raises_or_an_unknown_hit_policy_costs_hits_and_one_line_each(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

    pool = attention()
    backend = start(pool)
    assert all(backend.batch_set_v1(KEYS, places(pool, 0)))

    def fail(_: object) -> None:
        raise IndexError("no such page")

    policy: Any = "first_pages"
    with capture_logs() as lines, monkeypatch.context() as patched:
        patched.setattr(pool, "get_page_buffer_meta", fail)
        for _ in range(2):
            assert backend.batch_get_v1(KEYS, places(pool, 0)) == [False] * PAGES
            assert backend.batch_set_v1(KEYS, places(pool, 0)) == [False] * PAGES
            found = backend.batch_exists_v2(KEYS, [PoolTransfer(PoolName.KV, None, None, KEYS, policy)])
            assert (found.kv_hit_pages, found.restorable_prefix_pages) == (0, [])
    assert [line["reason"] for line in lines] == [
        "SGLang's kv pool returned no pages: IndexError: no such page",
        "the hit policy first_pages of the pool kv is not known",
    ]
    assert all(backend.batch_get_v1(KEYS, places(pool, PAGES)))
