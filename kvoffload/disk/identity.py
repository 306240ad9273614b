"""The identity of an engine's KV, and its fingerprint, which names the KV in lower tiers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path

from kvoffload.disk.tier_key import TierKey
from kvoffload.model.engine import EngineShape

FORMAT = 1
"""Incremented when the meaning of the tier's files changes."""

_DIGITS = 32


@dataclass(frozen=True, slots=True)
class KVIdentity:
    """The properties of an engine's KV. One engine uses another's KV only if all properties are equal.

    The layout of a rank's blocks is not one of these properties; it is in the header of the rank's slot file.

    Args:
        engine: name and version, because versions may lay out KV differently.
        weights: a snapshot's commit, a digest of all weight bytes, or the setting `weights_id`. Names, sizes and times
            are not enough: different weights can have the same name.
        keys: hash algorithm of the block keys, and the seed of their chain.
        parallel: how the model is spread over ranks.
        settings: other settings that change KV values: data types of weights and KV, quantization, overrides of the
            model.
        groups: for each KV cache group its kind, tokens per block, reach in tokens and lookahead flag.
    """

    engine: str
    weights: str
    keys: str
    parallel: Mapping[str, int]
    settings: Mapping[str, str] = field(default_factory=dict)
    groups: tuple[tuple[str, int, int | None, bool], ...] = ()

    @property
    def fingerprint(self) -> str:
        """A name that differs for different identities."""
        parts = json.dumps(self.as_parts(), sort_keys=True, separators=(",", ":"))
        return sha256(parts.encode()).hexdigest()[:_DIGITS]

    def as_parts(self) -> dict[str, object]:
        """Return everything that the fingerprint depends on."""
        return {**asdict(self), "format": FORMAT}


def with_key(identity: KVIdentity, key: TierKey | None) -> KVIdentity:
    """Add a key's id to an identity, so that only engines with this key find the KV."""
    return identity if key is None else replace(identity, settings={**identity.settings, "tier_key": key.id})


def index_key(identity: KVIdentity, key: TierKey | None) -> TierKey | None:
    """Derive the key that authenticates the index of this KV; None without a tier key."""
    return None if key is None else key.of(identity.fingerprint)


def groups_of(shape: EngineShape) -> tuple[tuple[str, int, int | None, bool], ...]:
    """Return the group properties that determine a block's bytes."""
    return tuple(
        (group.kind.value, group.block_tokens, group.reach_tokens, group.has_lookahead)
        for group in shape.groups
    )


def cpu_name() -> str:
    """Return a digest of the CPU's instruction set, which the layout inside a block may depend on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    # "flags" on x86, "Features" on ARM
    flags = {line for line in lines if line.startswith(("flags", "Features"))}
    return f"cpu {sha256(' '.join(sorted(flags)).encode()).hexdigest()[:16]}"
