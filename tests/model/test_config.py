from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict

from kvoffload.model.config import (
    ADVANCED,
    ALIASES,
    AUTO,
    SETTINGS,
    OffloadConfig,
    check_promises,
    parse_bytes,
    parse_config,
)
from kvoffload.model.engine import Promises
from kvoffload.model.errors import ConfigError

GIVEN = {"host_bytes": 2**20}
PATHS = ("host_path", "host_hugetlbfs", "disk_path", "tier_key_file", "journal_path")


def problems(raw: dict) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse_config(raw)
    assert str(caught.value) == "; ".join(caught.value.problems)
    return caught.value.problems


def without(key: str) -> dict[str, object]:
    return {name: value for name, value in GIVEN.items() if name != key}


def test_settings_that_are_not_given_have_defaults() -> None:
    assert parse_config(GIVEN) == OffloadConfig(host_bytes=2**20)


@pytest.mark.parametrize("raw", [{}, {"store_policy": "lazy"}, {"verify": "x", "nonsense": 1}])
def test_host_memory_has_no_default_and_the_error_says_what_to_give(raw: dict) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(raw, advice="the machine has 7 GiB")
    assert caught.value.problems[-1] == (
        'host_bytes is missing: host memory of one engine, all its ranks together, a number of bytes, such as "64GiB"; '
        "the machine has 7 GiB"
    )


RAW = {  # a value for each setting
    "host_bytes": "2GiB",
    "host_path": "/dev/shm/kvoffload",
    "host_hugetlbfs": "/dev/hugepages",
    "host_keep": False,
    "host_orphan_bytes": "1GiB",
    "node_share": False,
    "host_share": False,
    "store_policy": "lazy",
    "min_load_tokens": 0,
    "verify": "off",
    "disk_path": "/tmp/disk",
    "disk_bytes": "1TiB",
    "disk_min_hits": 0,
    "remote_url": "mooncake://localhost:50051?protocol=rdma",
    "remote_min_hits": 2,
    "weights_id": "v7",
    "tier_key_file": "/tmp/key",
    "journal_path": "/tmp/journal",
    "journal_max_bytes": "64MiB",
    "otlp_endpoint": "http://localhost:4318/v1/traces",
    "transfer_timeout_s": 5,
    "disk_drain_s": 1.5,
    "remote_timeout_s": 0.5,
    "layout": "blocks",
    "recurrent_prefix_boundaries": False,
    "batch_copies": "off",
}


def test_every_setting_can_be_set() -> None:
    assert list(RAW) == list(SETTINGS)
    assert set(ALIASES.values()) <= set(SETTINGS)
    sizes = {"host_bytes": 2**31, "host_orphan_bytes": 2**30, "disk_bytes": 2**40, "journal_max_bytes": 2**26}
    paths = {key: Path(str(RAW[key])) for key in PATHS}
    assert asdict(parse_config(RAW)) == {**RAW, **sizes, **paths}


def test_every_setting_is_described_with_its_default() -> None:
    assert set(list(RAW)[-6:]) == ADVANCED
    assert all(one.meaning and one.allowed for one in SETTINGS.values())
    defaults = {
        "host_bytes": "must be given",
        "host_path": "memory that ends with the engine",
        "host_hugetlbfs": "memory in host_path",
        "host_orphan_bytes": "host_bytes and an eighth",
        "min_load_tokens": "one block",
        "disk_bytes": "64.0 GiB",
        "transfer_timeout_s": "30.0",
        "recurrent_prefix_boundaries": "true",
    }
    assert {name: SETTINGS[name].default for name in defaults} == defaults


@pytest.mark.parametrize(
    ("settings", "outlives"),
    [
        ({}, False),
        ({"host_path": Path("/m")}, True),
        ({"disk_path": Path("/d")}, True),
        ({"remote_url": "s3://b"}, True),
    ],
)
def test_blocks_outlive_the_engine_in_files_and_in_lower_tiers(
    settings: dict[str, Any], outlives: bool
) -> None:
    assert OffloadConfig(host_bytes=1, **settings).outlives_engine is outlives


@pytest.mark.parametrize(("settings", "allowed"), [({}, 72), ({"host_orphan_bytes": 5}, 5)])
def test_stopped_engines_may_keep_a_little_more_than_one_engine_has(
    settings: dict[str, Any], allowed: int
) -> None:
    assert OffloadConfig(host_bytes=64, **settings).orphan_bytes == allowed


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("otlp_endpoint", "http://user:SECRET@localhost:4318/v1/traces", "OTEL_EXPORTER_OTLP_HEADERS"),
        ("otlp_endpoint", "http://localhost:4318/v1/traces?token=SECRET", 'without "@", "?" and "#"'),
        ("otlp_endpoint", "http://localhost:4318/v1/traces#SECRET", "it must be a URL such as"),
        ("otlp_endpoint", "grpc://user:SEC/RET@localhost:4317", '"http://localhost:4318/v1/traces"'),
        ("remote_url", "s3://name:SECRET@bucket/prefix", "is 's3://...@bucket/prefix'; it must be "),
        ("remote_url", "s3://name:SECRET@bucket/prefix", "without credentials"),
    ],
)
def test_secrets_in_urls_are_refused_and_not_repeated(key: str, value: str, hint: str) -> None:
    (problem,) = problems({**GIVEN, key: value})
    assert hint in problem
    assert "SEC" not in problem


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (1, 1),
        (2.0, 2),
        (0.5 * (1 << 30), 2**29),  # vLLM passes this value for `--kv-offloading-size 0.5`
        ("1", 1),
        (" 7 b ", 7),
        ("8GiB", 8 * 2**30),
        ("8gib", 8 * 2**30),
        ("8 GB", 8 * 10**9),
        ("1.5 KiB", 1536),
        ("0.5MB", 500_000),
        ("2TiB", 2 * 2**40),
        ("2tb", 2 * 10**12),
        ("9007199254740993", 9007199254740993),  # too many digits for a float
    ],
)
def test_numbers_of_bytes_are_read(value: object, number: int) -> None:
    assert parse_bytes(value) == number


NO_BYTES: list[object] = [
    *(0, -1, 1.5, 0.0, -1.0, 1e19, float("inf"), float("nan"), True, None, [], b"8"),
    *("", "0", "0.4", "-1", "1..", "1e9", "8XiB", "GiB", "8 GiB please", "9" * 5000),
]


@pytest.mark.parametrize("value", NO_BYTES)
def test_other_values_are_not_numbers_of_bytes(value: object) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # the caller says what is allowed
        parse_bytes(value)


BAD: dict[str, list[object]] = {
    "host_bytes": [0, "lots", None, 1.5],
    "cpu_bytes_to_use_per_rank": [-1, "", False],
    "store_policy": ["Eager", "", None, 3, ["eager"]],
    "min_load_tokens": [-1, 1.0, "16", "automatic", True, None],
    "lazy_offload": ["lazy", 1, None],
    "kv_offload_backend": ["disk", "CPU", None, ["cpu"]],
    "verify": ["on", True, None],
    "transfer_timeout_s": [0, -1, float("nan"), float("inf"), "30", True, None],
    "otlp_endpoint": ["", "localhost:4317", "grpc://localhost:4317", "http://", "http://a b", 4317, None],
    "layout": ["BLHNC", "block", None],
    "batch_copies": ["on", True, None],
    "journal_path": ["", "a\0b", 3, None, b"x"],
    "journal_max_bytes": [0, "much", None],
    "host_path": ["", "a\0b", 3, None],
    "host_hugetlbfs": ["", 3, None],
    "host_keep": ["no", 0, None],
    "host_share": ["no", 0, None],
    "host_orphan_bytes": [0, "lots", None],
    "node_share": ["no", 0, None],
    "disk_path": ["", "a\0b", 3, None],
    "disk_bytes": [0, "lots", None],
    "disk_min_hits": [-1, 1.0, "1", True, None],
    "disk_drain_s": [0, -1, "1", True, None],
    "weights_id": ["", " ", 7, None],
    "remote_url": ["", "redis://host:1", "s3://", "s3:/bucket", "mooncake://a b:1", 7, None],
    "remote_min_hits": [-1, 1.0, "1", True, None],
    "remote_timeout_s": [0, -1, "1", True, None],
    "tier_key_file": ["", "a\0b", 3, None],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in BAD.items() for value in values])
def test_a_bad_value_names_the_key_the_value_and_what_is_allowed(key: str, value: object) -> None:
    (problem,) = problems({**without(ALIASES.get(key, key)), key: value})
    assert problem.startswith(f"{key} is {value!r}; it must be ")


def test_all_problems_are_listed_at_once() -> None:
    found = problems({"host_byte": 1, "store_policy": "x", "verify": "y", "nonsense": 1, "host_bytes": 2**20})
    assert len(found) == 4
    assert len(problems({"host_bytes": "lots", "cpu_bytes_to_use": 2})) == 2


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("host_byte", "host_bytes"),
        ("lazy_ofload", "lazy_offload"),
        ("cpu_bytes_to_us", "cpu_bytes_to_use"),
        ("kv_ofload_backend", "kv_offload_backend"),
        ("host_bytes_per_rank", "host_bytes"),
        ("journal_for", "journal_path"),
        ("spill_after_hits", "disk_min_hits"),  # this name and the next are earlier names of settings
        ("disk_identity", "weights_id"),
    ],
)
def test_the_error_for_an_unknown_key_names_the_nearest_key(typed: str, meant: str) -> None:
    assert problems({**without(ALIASES.get(meant, meant)), typed: 1}) == (
        f"unknown key {typed!r}; did you mean {meant}?",
    )


def test_the_error_for_a_key_that_resembles_none_lists_all() -> None:
    assert problems({**GIVEN, "zzz": 1}) == (f"unknown key 'zzz'; known keys: {', '.join(RAW)}",)


@pytest.mark.parametrize(
    ("raw", "config"),
    [
        ({"cpu_bytes_to_use": 4096}, OffloadConfig(host_bytes=4096)),
        ({"cpu_bytes_to_use": 1.5 * (1 << 30)}, OffloadConfig(host_bytes=3 * 2**29)),
        ({"cpu_bytes_to_use_per_rank": "1KiB"}, OffloadConfig(host_bytes=1024)),
        ({**GIVEN, "lazy_offload": True}, OffloadConfig(host_bytes=2**20, store_policy="lazy")),
        ({**GIVEN, "lazy_offload": False}, OffloadConfig(host_bytes=2**20, store_policy="eager")),
        ({**GIVEN, "kv_offload_backend": "cpu"}, OffloadConfig(host_bytes=2**20)),
        ({**GIVEN, "min_load_tokens": "auto"}, OffloadConfig(host_bytes=2**20, min_load_tokens=AUTO)),
    ],
)
def test_auto_and_vllms_own_keys_are_accepted(raw: dict, config: OffloadConfig) -> None:
    assert parse_config(raw) == config


@pytest.mark.parametrize(
    ("one", "other", "key"),
    [
        (("host_bytes", 1), ("cpu_bytes_to_use", 2), "host_bytes"),
        (("host_bytes", 1), ("cpu_bytes_to_use_per_rank", 1), "host_bytes"),
        (("cpu_bytes_to_use", 1), ("cpu_bytes_to_use_per_rank", 1), "host_bytes"),
        (("store_policy", "lazy"), ("lazy_offload", True), "store_policy"),
    ],
)
def test_two_keys_for_one_setting_are_both_named(one: tuple, other: tuple, key: str) -> None:
    for first, second in ((one, other), (other, one)):
        assert problems({**without(key), **dict([first, second])}) == (
            f"{first[0]} and {second[0]} both set {key}; give one of the two",
        )


@pytest.mark.parametrize(
    ("key", "whole"), [("host_bytes", 1024), ("cpu_bytes_to_use", 1024), ("cpu_bytes_to_use_per_rank", 4096)]
)
def test_only_bytes_of_each_rank_are_multiplied_by_the_ranks(key: str, whole: int) -> None:
    assert parse_config({key: "1KiB"}, ranks=4).host_bytes == whole


@pytest.mark.parametrize("verify", ["sample", "full"])
def test_checksums_need_an_engine_that_recomputes_failed_loads(verify: str) -> None:
    config, fails = parse_config({**GIVEN, "verify": verify}), Promises(recovers_loads=False)
    check_promises(config, Promises())
    check_promises(parse_config({**GIVEN, "verify": "off"}), fails)
    with pytest.raises(ConfigError) as caught:
        check_promises(config, fails)
    (problem,) = caught.value.problems
    for text in (f"verify is {verify!r}", '"kv_load_failure_policy":"recompute"', "set verify to 'off'"):
        assert text in problem


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda each: st.lists(each, max_size=2) | st.dictionaries(st.text(), each, max_size=2),
    max_leaves=4,
)


def nested(depth: int) -> object:
    value: object = 0
    for _ in range(depth):
        value = [value]
    return value


HUGE = {
    "minus": -(10**5000),
    "digits": 10**5000,
    "no float": 10**400,
    "64 bits": 2**63,
    "nested": nested(100_000),
    "size": "9" * 5000 + "GiB",
    "spaces": "1" + " " * 100_000 + "!",
    "long": "x" * 10**6,
}


@pytest.mark.parametrize("key", [*SETTINGS, *ALIASES])
@pytest.mark.parametrize("value", HUGE.values(), ids=HUGE)
def test_no_value_is_too_large_or_too_deep_to_be_refused(key: str, value: object) -> None:
    if key in PATHS and isinstance(value, str):
        assert getattr(parse_config({**GIVEN, "host_path": "/dev/shm", key: value}), key) == Path(value)
        return
    (problem,) = problems({**without(ALIASES.get(key, key)), key: value})
    assert problem.startswith(f"{key} is ")
    assert len(problem) < 400


@pytest.mark.parametrize("key", ["x" * 10**6, -(10**5000), ("a",) * 1000], ids=["text", "digits", "tuple"])
def test_no_key_is_too_large_to_be_refused(key: object) -> None:
    (problem,) = problems({**GIVEN, key: 1})
    assert problem.startswith("unknown key ")
    assert len(problem) < 700


def test_huge_pages_need_a_folder_for_the_table() -> None:
    (problem,) = problems({**GIVEN, "host_hugetlbfs": "/dev/hugepages"})
    assert problem.startswith("host_hugetlbfs needs host_path, ")


@pytest.mark.parametrize("raw", [None, 3, "host_bytes", ["host_bytes"], [["host_bytes", 1]], True])
def test_settings_that_are_not_a_mapping_are_refused(raw: object) -> None:
    (problem,) = problems(raw)  # type: ignore[arg-type]
    assert problem == f"settings are {raw!r}; they must be keys with values"


@given(
    st.dictionaries(st.sampled_from([*SETTINGS, *ALIASES]) | st.text() | st.integers(), anything, max_size=6)
)
def test_any_input_gives_settings_or_one_sentence_for_each_problem(raw: dict) -> None:
    found: tuple[str, ...] = ()
    try:
        assert parse_config(raw).host_bytes >= 1
    except ConfigError as error:
        found = error.problems
    assert len(found) <= len(raw) + 1  # one more problem if host_bytes is missing
    assert all(found)
    assert found or set(raw) <= {*SETTINGS, *ALIASES}
