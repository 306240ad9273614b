from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvoffload.model.errors import ConfigError
from tests.remote.servers import Bucket

if TYPE_CHECKING:
    import torch

    from kvoffload_sglang.storage import KVOffloadStorage

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

PAGE, PAGES = 4, 8
KEYS = [hashlib.sha256(b"%d" % number).hexdigest() for number in range(PAGES)]
LAYOUTS = ["layer_first", "page_first", "page_first_direct", "page_head"]
Start = Callable[..., "KVOffloadStorage"]


def attention(layout: str, heads: int = 2, dtype: str = "float32") -> Any:
    """Return SGLang's host pool of an attention model with two layers. The pool holds `2 * PAGES` pages."""
    import torch
    from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    kind, tokens = getattr(torch, dtype), PAGE * PAGES
    layers = [tuple(torch.zeros(tokens, heads, 8, dtype=kind) for _ in range(2)) for _ in "kv"]
    addresses = [torch.tensor([each.data_ptr() for each in some], dtype=torch.uint64) for some in layers]
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=layers[0],
            v=layers[1],
            k_data_ptrs=addresses[0],
            v_data_ptrs=addresses[1],
            layout=KVBufferLayout.NHD,
        ),
        page_size=PAGE,
        head_num=heads,
        head_dim=8,
        v_head_dim=8,
        dtype=kind,
        device=torch.device("cpu"),
    )
    return MHATokenToKVPoolHost(
        info,
        2.0,
        0,
        PAGE,
        layout,
        pin_memory=False,
        device_capacity_tokens=tokens,
        start_layer=0,
        end_layer=2,
    )


def states(layout: str = "page_first") -> Any:
    """Return SGLang's host pool of recurrent states, with one state per page."""
    import torch
    from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

    info = MambaStateBufferInfo(temporal=torch.zeros(2, PAGES, 3, 5), conv=(torch.zeros(2, PAGES, 6),))
    return MambaPoolHost(info, 2.0, 0, device_capacity=PAGES, pin_memory=False, layout=layout)


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
    return [
        pool.get_data_page(start).clone() for start in places(pool, first, count)[:: pool.page_size].tolist()
    ]


@pytest.fixture(scope="session")
def settings(model: Path) -> dict[str, Any]:
    from sglang.srt.server_args import ServerArgs

    server = ServerArgs(model_path=str(model), device="cpu", skip_tokenizer_init=True)
    server.resolve_once()
    return dict(server.resolved_dict())


@pytest.fixture
def start(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Return a function that starts a backend with given pools, our settings, and SGLang's settings and rank."""
    from msgspec.structs import fields
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
    from sglang.srt.server_args import ServerArgs

    from kvoffload_sglang import storage
    from kvoffload_sglang.identity import Engine

    monkeypatch.setattr("kvoffload_sglang.identity.process_began_ns", lambda: None)
    namespaces = {each._NS_PATH: tuple(one.name for one in fields(each)) for each in ServerArgs._NAMESPACES}
    with ExitStack() as running:

        def begin(
            pools: dict[str, Any], ours: dict[str, object], sglang: dict[str, Any] | None = None, **rank: Any
        ) -> KVOffloadStorage:
            ranks = dict.fromkeys(("tp_rank", "pp_rank", "attn_cp_rank"), 0)
            sizes = dict.fromkeys(("tp_size", "pp_size", "attn_cp_size"), 1)
            off = dict.fromkeys(("is_mla_model", "enable_storage_metrics", "is_page_first_layout"), False)
            extra = {"interface_v1": 1, "disk_bytes": "1MiB", **ours}
            config = HiCacheStorageConfig(
                **{**ranks, **sizes, **off, "model_name": "model", "extra_config": extra, **rank}
            )
            engine = Engine({**settings, **(sglang or {})}, namespaces, config, 0, "this one")
            monkeypatch.setattr(storage, "this_engine", lambda _: engine)
            made = storage.KVOffloadStorage(config, {})
            running.callback(made.close)
            made.register_mem_pool_host(pools["kv"])
            for name, pool in pools.items():
                made.register_mem_host_pool_v2(pool, PoolName(name))
            made.on_host_pools_registered()
            assert all(cache.wait_open(20) for cache in made._caches.values())
            return made

        yield begin


@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_every_layout_pages_can_be_read_into_other_positions(
    start: Start, tmp_path: Path, layout: str
) -> None:
    pool = attention(layout)
    fill(pool, 1)
    written, others = pages(pool, 0), pages(pool, PAGES)
    backend = start({"kv": pool}, {"disk_path": str(tmp_path)})
    assert backend.batch_set_v1(KEYS, places(pool, 0)) == [True] * PAGES
    backend.close()
    backend = start({"kv": pool}, {"disk_path": str(tmp_path)})
    assert backend.batch_exists([*KEYS, "00"]) == PAGES
    some = KEYS[:5]
    assert backend.batch_get_v1(some, places(pool, PAGES, 5)) == [True] * 5
    assert all(map(_equal, pages(pool, PAGES, 5), written))
    assert all(map(_equal, pages(pool, PAGES + 5, 3), others[5:]))
    assert all(map(_equal, pages(pool, 0), written))


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one == other).all())


def test_a_hit_ends_at_the_last_page_with_a_state_and_a_window(start: Start, tmp_path: Path) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    pools = {"kv": attention("page_first"), "mamba": states(), "swa": attention("layer_first")}
    for seed, pool in enumerate(pools.values()):
        fill(pool, seed)
    backend = start(pools, {"disk_path": str(tmp_path)})

    def transfer(name: PoolName, numbers: Sequence[int], first: int = 0) -> PoolTransfer:
        keys = [KEYS[number] for number in numbers]
        indices = places(pools[name.value], first, len(keys))
        return PoolTransfer(name, indices, None, keys, PoolHitPolicy.TRAILING_PAGES)

    assert all(backend.batch_set_v1(KEYS[:7], places(pools["kv"], 0, 7)))
    state, window = transfer(PoolName.MAMBA, [1, 3, 5]), transfer(PoolName.SWA, [2, 3, 4])
    written = backend.batch_set_v2([state, window])
    assert written == {"mamba": [True] * 3, "swa": [True] * 3}

    asked = [transfer(PoolName.MAMBA, [7]), transfer(PoolName.SWA, [6, 7])]
    found = backend.batch_exists_v2(KEYS, asked)
    assert found.kv_hit_pages == 4
    assert found.restorable_prefix_pages == [4]
    assert found.extra_pool_hit_pages == {"kv": 7, "mamba": 6, "swa": 5}
    every = PoolTransfer(PoolName.SWA, None, None, KEYS, PoolHitPolicy.ALL_PAGES)
    assert backend.batch_exists_v2(KEYS, [every]).kv_hit_pages == 0
    assert backend.batch_exists_v2(KEYS).restorable_prefix_pages == list(range(1, 8))

    got = backend.batch_get_v2(
        [transfer(PoolName.MAMBA, [3], PAGES), transfer(PoolName.SWA, [2, 3, 0], PAGES)]
    )
    assert got == {"mamba": [True], "swa": [True, True, False]}
    assert _equal(pages(pools["mamba"], PAGES, 1)[0], pages(pools["mamba"], 1, 1)[0])
    assert all(map(_equal, pages(pools["swa"], PAGES, 2), pages(pools["swa"], 0, 2)))


def test_only_the_same_kv_is_found(start: Start, tmp_path: Path, model: Path) -> None:
    """With one change, a backend finds no page; without a change, the next backend still finds all pages."""
    ours: dict[str, object] = {"disk_path": str(tmp_path)}
    first = start({"kv": attention("page_first")}, ours)
    assert all(first.batch_set_v1(KEYS, places(attention("page_first"), 0)))
    first.close()
    pool = attention("page_first")
    other = tmp_path / "other"
    other.mkdir()
    for file in model.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rope_theta": 12345.0}))
    changes: dict[str, tuple[Any, dict[str, object], dict[str, Any], dict[str, Any]]] = {
        "weights": (pool, ours, {"model_path": str(other)}, {}),
        "a name for the weights": (pool, {**ours, "weights_id": "v2"}, {}, {}),
        "layout": (attention("page_first_direct"), ours, {}, {}),
        "type": (attention("page_first", dtype="float16"), ours, {}, {}),
        "heads": (attention("page_first", heads=4), ours, {}, {}),
        "rank": (pool, ours, {}, {"tp_rank": 1, "tp_size": 2}),
        "size": (pool, ours, {}, {"tp_size": 2}),
        "stage": (pool, ours, {}, {"pp_rank": 1, "pp_size": 2}),
        "quantization": (pool, ours, {"quantization": "fp8"}, {}),
        "attention backend": (pool, ours, {"attention_backend": "other"}, {}),
    }
    for change, (changed, settings, sglang, rank) in changes.items():
        backend = start({"kv": changed}, settings, sglang, **rank)
        assert backend.batch_exists(KEYS) == 0, change
        backend.close()
    same = start({"kv": pool}, ours, {"port": 1, "mem_fraction_static": 0.1, "max_running_requests": 3})
    assert same.batch_exists(KEYS) == PAGES


def test_only_one_rank_writes_replicated_kv_and_all_ranks_find_it_in_the_store(
    start: Start, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.reach(monkeypatch)
    ours: dict[str, object] = {"remote_url": f"{bucket.url}/ranks"}
    pools = [attention("page_first") for _ in range(2)]
    for seed, pool in enumerate(pools):
        fill(pool, seed)
    writer, reader = (
        start({"kv": pool}, ours, tp_rank=rank, tp_size=2, is_mla_model=True)
        for rank, pool in enumerate(pools)
    )
    assert all(writer.batch_set_v1(KEYS, places(pools[0], 0)))
    assert reader.batch_exists(KEYS) == PAGES
    assert all(reader.batch_get_v1(KEYS, places(pools[1], 0)))
    assert all(map(_equal, pages(pools[0], 0), pages(pools[1], 0)))
    with pytest.raises(ConfigError, match="use remote_url only"):
        start({"kv": pools[0]}, {"disk_path": "/nowhere"}, tp_size=2, is_mla_model=True)


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
        start({"kv": attention("page_first")}, {"disk_path": str(tmp_path)}, sglang)
    assert not list(tmp_path.iterdir())


def test_a_pool_that_is_registered_too_late_or_has_no_addresses_is_refused(
    start: Start, tmp_path: Path
) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolName

    backend = start({"kv": attention("page_first")}, {"disk_path": str(tmp_path)})
    with pytest.raises(ConfigError, match="the draft pool after the storage backend was attached"):
        backend.register_mem_host_pool_v2(attention("page_first"), PoolName.DRAFT)
    pool = attention("page_first")
    pool.layout = "of tomorrow"
    with pytest.raises(ConfigError, match="kv pool in the layout 'of tomorrow' has no addresses"):
        start({"kv": pool}, {"disk_path": str(tmp_path)})


def test_if_indices_do_not_match_the_keys_nothing_is_copied(start: Start, tmp_path: Path) -> None:
    pool = attention("page_first")
    backend = start({"kv": pool}, {"disk_path": str(tmp_path)})
    assert backend.batch_set_v1(KEYS, places(pool, 0, 3)) == [False] * PAGES
    assert backend.batch_get_v1(KEYS, places(pool, 0, 3)) == [False] * PAGES
    assert backend.batch_set_v1([], places(pool, 0, 0)) == []
    assert backend.batch_exists(KEYS) == 0
