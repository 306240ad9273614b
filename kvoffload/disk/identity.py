"""The identity of an engine's KV, and the fingerprint under which the KV is found in lower tiers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path

from kvoffload.disk.open_folder import FINGERPRINT_BYTES
from kvoffload.disk.tier_key import TierKey
from kvoffload.model.engine import EngineShape

FORMAT = 1
"""Increase this number when the meaning of the lower tiers' files changes."""


@dataclass(frozen=True, slots=True)
class KVIdentity:
    """The properties of an engine's KV. An engine uses another engine's KV only if all of these properties are equal.

    The layout of a rank's blocks is not among these properties. The header of the rank's slot file describes it.

    Args:
        engine: the engine's name and version, because different versions may lay out KV differently.
        weights: a snapshot's commit, a digest of all weight bytes, or the setting `weights_id`. Names, sizes and times
            are not enough, because different weights can have the same name.
        keys: the hash algorithm of the block keys, and its seed.
        parallel: how the model is spread over ranks.
        settings: other settings that change KV values, such as data types, quantization and overrides of the model.
        groups: for each KV cache group: its kind, tokens per block, reach in tokens and lookahead flag.
    """

    engine: str
    weights: str
    keys: str
    parallel: Mapping[str, int]
    settings: Mapping[str, str] = field(default_factory=dict)
    groups: tuple[tuple[str, int, int | None, bool], ...] = ()

    @property
    def fingerprint(self) -> str:
        """Return a short text that is different for every identity."""
        parts = json.dumps(self.as_parts(), sort_keys=True, separators=(",", ":"))
        return sha256(parts.encode()).hexdigest()[:FINGERPRINT_BYTES]

    def as_parts(self) -> dict[str, object]:
        """Return everything that the fingerprint depends on, as JSON types."""
        return {**asdict(self), "format": FORMAT}


def with_key(identity: KVIdentity, key: TierKey | None) -> KVIdentity:
    """Return the identity with the key's id added, so that only engines with this key find the KV."""
    return identity if key is None else replace(identity, settings={**identity.settings, "tier_key": key.id})


def index_key(identity: KVIdentity, key: TierKey | None) -> TierKey | None:
    """Return the key that authenticates the index of the identity's KV; None without a tier key."""
    return None if key is None else key.of(identity.fingerprint)


def groups_of(shape: EngineShape) -> tuple[tuple[str, int, int | None, bool], ...]:
    """Return the properties of the groups that determine the bytes of a block."""
    return tuple(
        (group.kind.value, group.block_tokens, group.reach_tokens, group.has_lookahead)
        for group in shape.groups
    )


def cpu_name() -> str:
    """Return a digest of the CPU's instruction set, because the layout of a block's bytes may depend on it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    # The line is called "flags" on x86 and "Features" on ARM.
    flags = {line for line in lines if line.startswith(("flags", "Features"))}
    return f"cpu {sha256(' '.join(sorted(flags)).encode()).hexdigest()[:16]}"
