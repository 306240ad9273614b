from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffload.model.config import OffloadConfig
from kvoffload.model.errors import ConfigError
from tests.captured_logs import capture_logs
from tests.settings import make_config
from tests.vllm.engine_rig import MARKS

pytestmark = MARKS


def config_of(extra: dict[str, object], device_bytes: int = 1, **parallel: int) -> OffloadConfig:
    from kvoffload_vllm import assembly

    given: Any = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
        parallel_config=SimpleNamespace(**{"world_size": 1, "data_parallel_index": 0, **parallel}),
    )
    return assembly._config(given, device_bytes, sharers=1)


# In each engine of a dense model, vLLM sets `data_parallel_size` to 1. With a mixture of experts, it is the
# number of engines.
@pytest.mark.parametrize("engines_known", [1, 2])
@pytest.mark.parametrize(("index", "file"), [(0, "journal"), (1, "journal.dp1")])
def test_each_engine_of_a_server_has_its_own_journal(index: int, file: str, engines_known: int) -> None:
    extra: dict[str, object] = {"cpu_bytes_to_use_per_rank": "1KiB", "journal_path": "/somewhere/journal"}
    rank = index if engines_known > 1 else 0
    found = config_of(
        extra,
        world_size=4,
        data_parallel_index=index,
        data_parallel_size=engines_known,
        data_parallel_rank=rank,
    )
    assert found.journal_path == Path("/somewhere", file)
    assert found.host_bytes == 4096, "memory per rank is multiplied by the engine's own ranks only"


def test_a_start_without_host_memory_advises_a_multiple_of_vllms_own_cache() -> None:
    with pytest.raises(ConfigError, match="host_bytes is missing") as refused:
        config_of({"store_policy": "lazy"}, 2**20, world_size=4, local_world_size=2)
    assert "left for 2 ranks; advised: 12.0 MiB, 3.0 times the device's KV cache" in str(refused.value)
    with pytest.raises(ConfigError, match="KV cache, with store_policy lazy; at most"):
        config_of({"disk_path": "/d"}, 2**50)


@pytest.mark.parametrize(("disk", "warned"), [(Path("/d"), ["block hashes"]), (None, [])])
def test_hashes_with_findable_collisions_log_one_warning_at_the_start(
    disk: Path | None, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvoffload_vllm import assembly

    monkeypatch.setattr(assembly, "find_problems", lambda *_, **__: [])
    given: Any = SimpleNamespace(
        cache_config=SimpleNamespace(prefix_caching_hash_algo="xxhash"),
        parallel_config=SimpleNamespace(data_parallel_index=0),
    )
    nothing: Any = None
    with capture_logs() as lines:
        assembly._identification(given, make_config(disk_path=disk), nothing)
    assert [line["check"] for line in lines if line["event"] == "doctor_warning"] == warned


def test_every_hash_of_vllm_is_known() -> None:
    from typing import get_args

    from vllm.config.cache import PrefixCachingHashAlgo

    from kvoffload_vllm.doctor import _HASHES

    assert set(get_args(PrefixCachingHashAlgo)) - set(_HASHES) == {"xxhash", "xxhash_cbor"}


@pytest.mark.parametrize("side", ["start_scheduler", "start_worker"])
def test_an_unusable_key_file_stops_the_start_of_each_side(
    side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvoffload_vllm import assembly

    config = make_config(tier_key_file=tmp_path / "key")
    monkeypatch.setattr(assembly, "_check", lambda *_: (None, config))
    monkeypatch.setattr(assembly, "find_failure_policy", lambda _: "recompute")
    nothing: Any = None
    with pytest.raises(ConfigError, match=r"tier_key_file: .* is not used"):
        getattr(assembly, side)(nothing, nothing, nothing)
