"""From arguments to options."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from kvoffload.cli.demo.address import Address, parse_address
from kvoffload.cli.demo.options import DemoOptions, add_arguments, demo_options
from kvoffload.model.errors import KVOffloadError


def options(line: str = "") -> DemoOptions:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return demo_options(parser.parse_args(line.split()))


def test_defaults_are_those_of_the_options() -> None:
    assert options() == DemoOptions()


def test_numbers_have_one_default_only() -> None:
    changed = options(
        "--conversations 2 --turns 3 --first-tokens 4 --turn-tokens 5 --answer-tokens 6 --concurrency 7"
    )
    names = ("conversations", "turns", "first_tokens", "turn_tokens", "answer_tokens", "concurrency")
    assert [getattr(changed, name) for name in names] == [2, 3, 4, 5, 6, 7]
    assert changed.message_tokens == 4 + 2 * 5
    assert changed.conversation_tokens == 4 + 2 * 5 + 3 * 6


@pytest.mark.parametrize(
    ("line", "concurrency"), [("", 2), ("--remote mooncake", 1), ("--remote s3 --concurrency 3", 3)]
)
def test_engines_that_share_serve_one_conversation_at_a_time(line: str, concurrency: int) -> None:
    assert options(line).concurrency == concurrency


@pytest.mark.parametrize(
    ("line", "attention", "reach"),
    [
        ("", "full", None),
        ("--window", "sliding_window", 256),
        ("--window 100", "sliding_window", 100),
        ("--chunk", "chunked_local", 256),
        ("--chunk 64", "chunked_local", 64),
        ("--recurrent", "recurrent", None),
    ],
)
def test_attention(line: str, attention: str, reach: int | None) -> None:
    found = options(line)
    assert (found.attention, found.reach_tokens) == (attention, reach)


def test_documents_may_be_repeated() -> None:
    assert options("--document a --document b").documents == (Path("a"), Path("b"))


def test_settings_of_kvoffload_keep_their_names() -> None:
    found = options(
        "--host-bytes 1GiB --store-policy lazy --config verify=off --config transfer_timeout_s=2.5"
    )
    assert found.offload == {
        "host_bytes": "1GiB",
        "store_policy": "lazy",
        "verify": "off",
        "transfer_timeout_s": 2.5,
    }


def test_settings_may_be_one_json_object() -> None:
    assert options('--config {"host_bytes":5,"verify":"off"}').offload == {"host_bytes": 5, "verify": "off"}


@pytest.mark.parametrize("pair", ["host_bytes=5", "cpu_bytes_to_use=5", "host_bytes_per_rank=5"])
def test_any_size_replaces_the_default(pair: str) -> None:
    key = pair.partition("=")[0]
    assert options(f"--config {pair}").offload == {key: 5}


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("3", 3), ("0.5", 0.5), ("8GiB", "8GiB"), ('"x"', '"x"'), ("", ""), ("null", "null")],
)
def test_values(text: str, value: object) -> None:
    assert options(f"--config key={text}").offload["key"] == value


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--config novalue", "neither a JSON object nor a file"),
        ("--config =3", "KEY=VALUE or a JSON object, not '=3'"),
        ("--host-bytes 1 --config host_bytes=2", "host_bytes is set twice: by --host-bytes and by --config"),
        ("--config verify=off --config verify=full", "verify is set twice in --config"),
        ("--serve-for 3", "--serve-for needs --serve-metrics"),
    ],
)
def test_what_does_not_go_together(line: str, message: str) -> None:
    with pytest.raises(KVOffloadError, match=message):
        options(line)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9464", Address("127.0.0.1", 9464)),
        (":9464", Address("127.0.0.1", 9464)),
        ("0", Address("127.0.0.1", 0)),
        ("0.0.0.0:80", Address("0.0.0.0", 80)),
        ("localhost:80", Address("localhost", 80)),
        ("[::1]:80", Address("::1", 80)),
    ],
)
def test_addresses(text: str, address: Address) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", "host", "host:", "1:2:3", "::1", "-1", "65536", "80x", "²"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="HOST:PORT"):
        parse_address(text)
