from __future__ import annotations

import pytest

from kvoffload.model.errors import ConfigError
from kvoffload.remote.address import BucketAddress, parse_address


@pytest.fixture(autouse=True)
def no_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ALLOW_HTTP", "AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("path", "prefix"),
    [("", ""), ("/", ""), ("/team/kv", "team/kv/"), ("/team/kv/", "team/kv/"), ("/..kv", "..kv/")],
)
def test_a_prefix_ends_in_one_slash(path: str, prefix: str) -> None:
    assert parse_address(f"s3://b{path}") == BucketAddress("b", prefix)


_SEGMENTS = ("/x", "x//y", "x//", ".", "..", "../x", "x/../y", "x/..", "./x", "x/.", "/x//y")


@pytest.mark.parametrize("path", [*_SEGMENTS, "x?y", "x#y"])
def test_a_prefix_with_odd_segments_a_query_or_a_fragment_is_refused(path: str) -> None:
    reason = "a PREFIX is names with one" if path in _SEGMENTS else "unknown form"
    with pytest.raises(ConfigError, match=reason):
        parse_address(f"s3://b/{path}")


@pytest.mark.parametrize(
    ("name", "value", "is_plain"),
    [
        ("AWS_ALLOW_HTTP", "true", True),
        ("AWS_ENDPOINT", "HTTP://host:9000", True),
        ("AWS_ENDPOINT_URL", "http://host:9000", True),
        ("AWS_ALLOW_HTTP", "false", False),
        ("AWS_ENDPOINT", "https://host:9000", False),
    ],
)
def test_http_without_tls_causes_a_warning(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, is_plain: bool
) -> None:
    assert parse_address("s3://b").caution == ""
    monkeypatch.setenv(name, value)
    assert ("session token" in parse_address("s3://b").caution) is is_plain
