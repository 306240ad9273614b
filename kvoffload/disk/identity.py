"""The identity of an engine's KV, and its fingerprint, under which lower tiers keep it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256

from kvoffload.disk.tier_key import TierKey
from kvoffload.model.engine import EngineShape

FORMAT = 1
"""Incremented when the meaning of the tier's files changes."""

_DIGITS = 32


@dataclass(frozen=True, slots=True)
class KVIdentity:
    """What must be equal for one engine to use another's KV. The layout of a rank's blocks is in its slot file's header.

    Args:
        engine: name and version, as engines change how they lay out KV.
        weights: a snapshot's commit, a digest of all weight bytes, or the setting `weights_id`. Names, sizes and times are
            not enough: other weights under the same name have other KV.
        keys: hash algorithm of the keys and the seed that their chain begins with.
        parallel: how the model is spread over ranks.
        settings: other settings that change the values: types of weights and of KV, quantisation, overrides of the model.
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
        """A name that is equal only for equal identities."""
        parts = json.dumps(self.as_parts(), sort_keys=True, separators=(",", ":"))
        return sha256(parts.encode()).hexdigest()[:_DIGITS]

    def as_parts(self) -> dict[str, object]:
        """Return everything that enters the fingerprint."""
        return {**asdict(self), "format": FORMAT}


def with_key(identity: KVIdentity, key: TierKey | None) -> KVIdentity:
    """Return the identity of KV that is authenticated with a key, so that only engines with this key find it."""
    return identity if key is None else replace(identity, settings={**identity.settings, "tier_key": key.id})


def index_key(identity: KVIdentity, key: TierKey | None) -> TierKey | None:
    """Return the key that authenticates this KV's index, and no index of other KV."""
    return None if key is None else key.of(identity.fingerprint)


def groups_of(shape: EngineShape) -> tuple[tuple[str, int, int | None, bool], ...]:
    """Return the properties of the groups that the bytes of a block depend on."""
    return tuple(
        (group.kind.value, group.block_tokens, group.reach_tokens, group.has_lookahead)
        for group in shape.groups
    )
