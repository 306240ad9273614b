from __future__ import annotations

from concurrent.futures import CancelledError, ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffload.disk.identity import KVIdentity
from kvoffload_vllm.kv_identity import Identification, persists

IDENTITY = KVIdentity("engine", "weights", "keys", {"tensor": 2})


def offload(identity: KVIdentity | None) -> Any:
    return SimpleNamespace(disk_identity=identity)


def test_the_identity_is_computed_from_the_first_step_on_and_sent_when_the_disk_has_it() -> None:
    identification = Identification(lambda: IDENTITY)
    with ThreadPoolExecutor() as pool:
        found = pool.submit(identification.identify)
        assert not found.done()
        assert identification.step(offload(None)) is None
        assert found.result() is IDENTITY
    assert [identification.step(offload(IDENTITY)) for _ in range(2)] == [IDENTITY, None]


def test_the_weights_are_read_once_for_both_tiers() -> None:
    calls, begun = list[int](), Barrier(2)

    def find() -> KVIdentity:
        calls.append(1)
        return IDENTITY

    identification = Identification(find)
    identification.step(offload(None))

    def ask() -> KVIdentity:
        begun.wait()
        return identification.identify()

    with ThreadPoolExecutor() as pool:
        disk, remote = pool.submit(ask), pool.submit(ask)
        assert disk.result() is remote.result()
    assert calls == [1]


def test_an_engine_that_ends_before_its_first_step_computes_no_identity() -> None:
    identification = Identification(lambda: pytest.fail("looked for"))
    identification.close()
    with pytest.raises(CancelledError):
        identification.identify()


@pytest.mark.parametrize(
    ("adapter", "names", "expected"),
    [
        (None, [], True),
        (None, ["ab" * 32], True),
        (None, ["ab" * 32, "0f" * 64], True),
        (None, ["image-1"], False),
        (None, ["ab" * 32, "x" * 64], False),
        ("adapter", [], False),
    ],
)
def test_r18_a_request_may_persist_blocks_only_if_its_keys_depend_only_on_content(
    adapter: str | None, names: list[str], expected: bool
) -> None:
    request: Any = SimpleNamespace(
        lora_request=adapter, mm_features=[SimpleNamespace(identifier=name) for name in names]
    )
    assert persists(request) is expected
