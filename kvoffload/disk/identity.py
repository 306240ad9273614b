"""What makes KV usable by another process, and its fingerprint: lower tiers are named by it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256

from kvoffload.model.engine import EngineShape

FORMAT = 1
"""Raised with every change of what the tier's files mean."""

_DIGITS = 32


@dataclass(frozen=True, slots=True)
class KVIdentity:
    """All that two engines must share for one to use the other's KV. How a rank's blocks lie is in its slot file's header.

    Args:
        engine: name and version, as engines change how they lay out KV.
        weights: a snapshot's commit, a digest of all weight bytes, or the operator's word. Names, sizes and times are
            not enough: other weights under the same name have other KV.
        keys: hash algorithm of the keys and the seed that their chain begins with.
        parallel: how the model is spread over ranks.
        settings: what else changes the numbers: types of weights and of KV, quantisation, overrides of the model.
        groups: kind, tokens a block and reach of each KV cache group.
    """

    engine: str
    weights: str
    keys: str
    parallel: Mapping[str, int]
    settings: Mapping[str, str] = field(default_factory=dict)
    groups: tuple[tuple[str, int, int | None, bool], ...] = ()

    @property
    def fingerprint(self) -> str:
        """A name that only equal identities have."""
        parts = json.dumps(self.as_parts(), sort_keys=True, separators=(",", ":"))
        return sha256(parts.encode()).hexdigest()[:_DIGITS]

    def as_parts(self) -> dict[str, object]:
        """Return all that the fingerprint is of."""
        return {**asdict(self), "format": FORMAT}


def groups_of(shape: EngineShape) -> tuple[tuple[str, int, int | None, bool], ...]:
    """Return what of an engine's groups its blocks depend on."""
    return tuple(
        (group.kind.value, group.block_tokens, group.reach_tokens, group.reads_ahead)
        for group in shape.groups
    )
