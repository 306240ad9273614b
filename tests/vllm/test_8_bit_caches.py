from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tests.vllm.engine_rig import MARKS, SLOT_BYTES, Asked, check_reloads, offloading, prompt, same, truths

if TYPE_CHECKING:
    import pytest

pytestmark = MARKS


def test_blocks_of_8_bit_caches_are_stored_and_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {f"r{number}": Asked(prompt(number), 12) for number in range(4)}
    # vLLM's CPU platform only accepts fp8 caches if it finds AVX-512. Our torch ops do not need AVX-512.
    monkeypatch.setattr("torch.cpu._is_avx512_supported", lambda: True)
    with offloading("qwen3", folder, kv_cache_dtype="fp8") as rig:
        expected = truths(rig, asked)
        assert rig.pump._arena.layout.slot_bytes == SLOT_BYTES // 4

        def serve() -> bool:
            # Run the requests one by one, as `truths` does: concurrent requests round differently, which changes
            # a log-probability by 0.001.
            return all(same(rig.run({name: one})[name], expected[name]) for name, one in asked.items())

        check_reloads(rig, serve, 8 * len(asked))
