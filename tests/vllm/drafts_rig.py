"""Runs engines with speculative decoding: with a draft model, an EAGLE head or n-grams.

The draft model is the model itself, so that vLLM accepts all of its drafts. vLLM accepts most drafts of the head
(`stock/drafted.py`), and some of the n-grams'. So requests go through all paths of accepted and rejected drafts.

Drafts with wrong KV cost only speed: the tokens stay the same. So tests count which drafts vLLM accepts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from kvoffload_vllm.support import release_of
from tests.vllm.engine_rig import Asked, Reported, Rig, check_same, prompt
from tests.vllm.scenes import Scene, Stage, requests_for, stage
from tests.vllm.stock import drafted, engines

KINDS = ("draft_model", "eagle", "ngram")
BLOCK = 32
DRAFTS = 3  # the number of drafts after each token
REQUESTS = requests_for("qwen3")
LONG = {f"l{number}": Asked(prompt(20 + number), 48) for number in range(4)}
"""Requests that generate so many tokens that n-grams repeat."""


@dataclass
class Drafts:
    """How many drafts vLLM has checked, and how many of these it has accepted."""

    checked: int = 0
    accepted: int = 0

    @property
    def rate(self) -> float:
        return self.accepted / self.checked


@contextmanager
def drafts(rig: Rig) -> Iterator[Drafts]:
    """Count the drafts during the `with` block."""
    counted = Drafts()

    def count(*_: object, num_draft_tokens: int, num_accepted_tokens: int, **__: object) -> None:
        counted.checked += num_draft_tokens
        counted.accepted += num_accepted_tokens

    with patch.object(rig.scheduler, "make_spec_decoding_stats", count):
        yield counted


def skip_without_drafts(kind: str) -> None:
    """Skip the test if this vLLM, with its model runner, cannot draft in this way."""
    if engines.IS_V2_RUNNER and kind == "ngram":
        pytest.skip("vLLM uses the V1 runner for n-grams")
    if release_of(version("vllm")) == (0, 30):
        if not engines.IS_V2_RUNNER:
            pytest.skip("without Triton, this vLLM cannot check drafts")
        if kind == "draft_model":
            pytest.skip("runner V2 of this vLLM has no draft models")


def without_connector_and_drafts(folder: Path) -> dict[str, Reported]:
    """Return the answers to all requests of an engine that has neither a connector nor drafts."""
    with engines.in_process(drafted.make_target(folder / "target"), num_gpu_blocks_override=512) as llm:
        return Rig(llm).run({**REQUESTS, **LONG})


@contextmanager
def drafting(
    kind: str | None, folder: Path, expected: Mapping[str, Reported], **options: Any
) -> Iterator[Stage]:
    """Run an engine with the connector, and with drafts of this kind if there is one, during the `with` block."""
    if kind is not None:
        skip_without_drafts(kind)
    speculation: dict[str, Any] = {} if kind is None else {"speculative_config": _speculation(kind, folder)}
    model = drafted.make_target(folder / "target")
    with stage(
        "qwen3", folder, checkpoint=model, asked=REQUESTS, expected=expected, **speculation, **options
    ) as on:
        if kind == "eagle":
            # At the end of a prompt's chunk, vLLM gives a head a token that is not the next one. The KV from there on
            # depends on where chunks end, and a hit changes this.
            on.rig.unstable = draft_regions(on.rig)
        yield on


def _speculation(kind: str, folder: Path) -> dict[str, Any]:
    options: dict[str, dict[str, Any]] = {
        "draft_model": {"model": str(folder / "target")},
        "eagle": {"model": str(folder / "head")},
        "ngram": {"prompt_lookup_min": 2, "prompt_lookup_max": 4},
    }
    if kind == "eagle":
        drafted.make_head(folder / "head")
    return {"method": kind, "num_speculative_tokens": DRAFTS, **options[kind]}


def draft_regions(rig: Rig) -> frozenset[int]:
    """Return the numbers of the memory regions that have the KV of draft layers."""
    # Before vLLM 0.29, each layer has a tensor of its own.
    layers = [
        layer
        for tensor in rig.scheduler.kv_cache_config.kv_cache_tensors
        for layer in (getattr(tensor, "layers", None) or tensor.shared_by)
    ]
    regions = len(rig.pump._arena.layout.regions)
    assert regions % len(layers) == 0
    of_target = tuple(f"model.layers.{number}." for number in range(drafted.LAYERS))
    return frozenset(
        region
        for region in range(regions)
        if not layers[region * len(layers) // regions].startswith(of_target)
    )


def check_scene(on: Stage, scene: Scene) -> None:
    """Check that a scene loads blocks, that vLLM accepts some drafts in it, and that no answer changes."""
    before = on.rig.counts
    with drafts(on.rig) as counted:
        assert not on.different(scene(on))
    assert counted.accepted > 0
    assert on.rig.counts.minus(before).count("kvoffload_load_blocks_total", "loaded") > 0


def serve_alone(on: Stage, *, from_host: bool) -> tuple[Drafts, list[int]]:
    """Serve the long requests one by one, from the host or the device. Return the drafts and the tokens found."""
    found = []
    with drafts(on.rig) as counted:
        for name, asked in LONG.items():
            if from_host:
                on.forget_on_device()
            answer = on.rig.run({name: asked})
            check_same(answer, on.expected)
            found.append(answer[name].cached)
    return counted, found


def check_acceptance(on: Stage) -> Drafts:
    """Check that vLLM accepts as many drafts after loads as after its own hits on the device. Return the former."""
    on.rig.run(LONG)
    on.rig.finish()
    device, found_on_device = serve_alone(on, from_host=False)
    before = on.rig.counts
    host, found_on_host = serve_alone(on, from_host=True)
    assert found_on_host == found_on_device
    loaded = on.rig.counts.minus(before).count("kvoffload_load_blocks_total", "loaded")
    assert loaded * BLOCK == sum(found_on_host) > 0
    assert host.accepted > 0
    assert host.rate >= device.rate
    return host
