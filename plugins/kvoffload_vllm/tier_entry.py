"""Reads the entry of kvoffload's tier below vLLM's own `OffloadingConnector`, without importing vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvoffload.model.config import OffloadConfig
from kvoffload_vllm.support import release_of

_TYPE = "KVOffloadTier"
_MODULE = "kvoffload_vllm.secondary_tier"
_SINCE = (0, 33)  # the first version of vLLM with tiers that kvoffload can use
_CONNECTOR, _SPEC = "OffloadingConnector", "TieringOffloadingSpec"
_OF_VLLM = {"type", "module_path", "enable_kv_events", "backpressure"}
"""The keys of an entry that vLLM or the tier's base class reads."""


def has_tiers(version: str) -> bool:
    """Return whether this version of vLLM has tiers that kvoffload can use."""
    return release_of(version) >= _SINCE


def find_tier(entries: Iterable[Mapping[str, Any]]) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
    """Return the connector whose `secondary_tiers` contain kvoffload's tier, and the tier's entry.

    Args:
        entries: `kv_transfer_config`, and the entries of a MultiConnector in it.
    """
    for connector in entries:
        extra = connector.get("kv_connector_extra_config")
        tiers = extra.get("secondary_tiers") if isinstance(extra, dict) else None
        for tier in tiers if isinstance(tiers, list) else ():
            if isinstance(tier, dict) and (tier.get("type") == _TYPE or tier.get("module_path") == _MODULE):
                return connector, tier
    return None


def tier_entry_problems(connector: Mapping[str, Any], tier: Mapping[str, Any]) -> Iterator[str]:
    """Yield the reasons why vLLM would not create the tier."""
    extra = connector["kv_connector_extra_config"]
    if connector.get("kv_connector") != _CONNECTOR:
        yield f"secondary_tiers belong to {_CONNECTOR}, and kv_connector is {connector.get('kv_connector')!r:.80}"
    if extra.get("spec_name") != _SPEC:
        yield f"spec_name is {extra.get('spec_name')!r:.80}; vLLM reads secondary_tiers only with {_SPEC!r}"
    for name, wanted in (("type", _TYPE), ("module_path", _MODULE)):
        if tier.get(name) != wanted:
            yield f"{name} of the tier is {tier.get(name)!r:.80}; it must be {wanted!r}"


def tier_settings(tier: Mapping[str, Any]) -> dict[str, Any]:
    """Return kvoffload's settings in the tier's entry."""
    return {name: value for name, value in tier.items() if name not in _OF_VLLM}


def parse_tier(settings: Mapping[str, object]) -> OffloadConfig:
    """Return the tier's parsed settings.

    Raises:
        ConfigError: a key is unknown or does not concern a tier, a value is not allowed, or an address is invalid.
    """
    from kvoffload.remote.address import parse_address
    from kvoffload.tier_cache import tier_config

    config = tier_config(settings)
    if config.remote_url is not None:
        parse_address(config.remote_url)
    return config
