from __future__ import annotations

import pytest

from kvoffload.model.config import ALIASES, SETTINGS, parse_config
from kvoffload.model.errors import ConfigError
from kvoffload.model.peers import PEERS, find_counterpart

ROWS = [(key, row) for peer in PEERS.values() for key, row in peer.keys.items()]


def test_the_counterparts_are_settings() -> None:
    assert {row.setting for _, row in ROWS} <= {*SETTINGS, ""}
    assert all(row.note for _, row in ROWS)
    assert all(row.setting for _, row in ROWS if row.convert is not None or row.is_per_rank)


def test_the_keys_that_are_accepted_are_in_the_table_too() -> None:
    simple = PEERS["vLLM's SimpleCPUOffloadConnector"].keys
    assert {name: simple[name].setting for name in ALIASES} == ALIASES


@pytest.mark.parametrize("product", PEERS)
def test_each_key_is_found_in_its_own_row(product: str) -> None:
    peer = PEERS[product]
    for key, row in peer.keys.items():
        assert peer.find(key.replace("*", "x")) == row


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("LMCACHE_CHUNK_SIZE", "chunk_size"),
        ("LMCACHE_LMCACHE_INSTANCE_ID", "lmcache_instance_id"),
        ("lmcache.chunk_size", "chunk_size"),
        ("blend_min_tokens", "blend_*"),
        ("LMCACHE_EXTRA_CONFIG", "extra_config*"),
    ],
)
def test_a_key_has_several_names(name: str, key: str) -> None:
    assert find_counterpart(name) == ("LMCache in process", PEERS["LMCache in process"].keys[key])


@pytest.mark.parametrize(
    "name", ["", "-", "host", "port", "disk", "lazy", "x" * 10**6, 7, None, ("chunk_size",)]
)
def test_other_names_have_none(name: object) -> None:
    assert find_counterpart(name) is None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "max_local_cpu_size",
            "'max_local_cpu_size' is a key of LMCache in process; set host_bytes (GiB of one rank; ",
        ),
        ("chunk_size", "'chunk_size' is a key of LMCache in process; it has no counterpart (blocks are "),
        (
            "eviction_policy",
            "'eviction_policy' is a key of vLLM's OffloadingConnector; it has no counterpart (",
        ),
        ("l1_size_gb", "'l1_size_gb' is a key of LMCache's server; set host_bytes ("),
        (
            "kv_offloading_size",
            "'kv_offloading_size' is a key of vLLM's --kv-offloading-size; set host_bytes (",
        ),
        ("DYN_KVBM_DISK_CACHE_GB", "'DYN_KVBM_DISK_CACHE_GB' is a key of Dynamo's KVBM; set disk_bytes ("),
        ("num_cpu_blocks", "'num_cpu_blocks' is a key of vLLM's SimpleCPUOffloadConnector; set host_bytes ("),
    ],
)
def test_the_error_for_a_products_key_names_the_counterpart(name: str, said: str) -> None:
    found = find_counterpart(name)
    assert found is not None
    # A key that replaces host_bytes is the only problem, because host_bytes was meant.
    given = {} if found[1].setting == "host_bytes" else {"host_bytes": 1}
    with pytest.raises(ConfigError) as caught:
        parse_config({**given, name: 1})
    (problem,) = caught.value.problems
    assert problem.startswith(said)
    assert problem.endswith(f"({found[1].note})")
