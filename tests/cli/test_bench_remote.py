"""`kvoffload bench remote`: real stores and the real copies; the engines are left to `make bench`."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from kvoffload.cli.main import main
from kvoffload.model.ids import BlockKey
from kvoffload.remote.bucket import BucketStore
from kvoffload.remote.values import Shard

SMALL = ["bench", "remote", "--copies-only", "--mib", "1", "--block-kib", "64", "--repeats", "2"]


@pytest.mark.tools("ibverbs")
def test_each_way_is_held_against_the_stores_own_client_and_a_socket(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*SMALL, "--json"]) == 0
    reported = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert [(line["what"], line["unit"]) for line in reported["lines"]] == [
        (f"{way} of blocks of 64 KiB, {store}{part}", unit)
        for store in ("Mooncake", "SeaweedFS (S3)")
        for way in ("put", "get")
        for part, unit in (
            (", over the store's own client", "x"),
            (", over a bare socket", "x"),
            ("", " GB/s"),
        )
    ]
    assert all(line["median"] > 0 for line in reported["lines"])


def test_wrong_bytes_are_not_timed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    get = BucketStore.get

    def flipped(
        store: BucketStore, shard: Shard, keys: Sequence[BlockKey], buffers: Sequence[memoryview]
    ) -> list[int]:
        arrived = get(store, shard, keys, buffers)
        buffers[0][100] ^= 1
        return arrived

    monkeypatch.setattr(BucketStore, "get", flipped)
    assert main([*SMALL, "--store", "s3"]) == 2
    assert "a load of the store ended as done, 0 blocks missing, 1 blocks wrong" in capsys.readouterr().err
