"""The limits that a client sets for one request in `kv_transfer_params`, with the meaning of vLLM's OffloadingConnector.

    max_load_tokens      a non-negative integer: load at most so many tokens beyond those that the device holds
    max_offload_tokens   a non-negative integer: store only the blocks of so many first tokens
    kv_load_tiers        a list of {"medium": "CPU" or "STORAGE", "locality": "LOCAL" or "REMOTE"}; a part that is left out
                         matches anything. Fetch only from lower tiers that match an entry. The host is always searched

A value of another form is ignored. So is an entry of another form, unless all entries are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvoffload.logs import get_logger
from kvoffload.model.facts import NO_LIMITS, Limits
from kvoffload.model.wire import LOWER_TIERS, Tier
from kvoffload_vllm.places import PLACES, Place

log = get_logger("scheduler")

_ALLOWED = {
    "max_load_tokens": "a non-negative integer",
    "max_offload_tokens": "a non-negative integer",
    "kv_load_tiers": 'a list of {"medium": "CPU" or "STORAGE", "locality": "LOCAL" or "REMOTE"}',
}
_PARTS = {"medium": ("CPU", "STORAGE"), "locality": ("LOCAL", "REMOTE")}


class LimitReader:
    """Reads requests' limits. Logs the first value of each name that has another form."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def read(self, params: Mapping[str, Any]) -> Limits:
        """Return the limits in a request's `kv_transfer_params`."""
        if _ALLOWED.keys().isdisjoint(params):
            return NO_LIMITS
        tokens = {name: self._tokens(params, name) for name in ("max_load_tokens", "max_offload_tokens")}
        return Limits(tokens["max_load_tokens"], tokens["max_offload_tokens"], self._tiers(params))

    def _tokens(self, params: Mapping[str, Any], name: str) -> int | None:
        value = params.get(name)
        if type(value) is int and value >= 0:
            return value
        if value is not None:
            self._ignored(name, value)
        return None

    def _tiers(self, params: Mapping[str, Any]) -> tuple[Tier, ...] | None:
        entries = params.get("kv_load_tiers")
        if entries is None:
            return None
        if not isinstance(entries, list):
            self._ignored("kv_load_tiers", entries)
            return None
        wanted = [place for entry in entries if (place := self._place(entry)) is not None]
        if entries and not wanted:
            return None
        return tuple([tier for tier in LOWER_TIERS if any(_matches(each, PLACES[tier]) for each in wanted)])

    def _place(self, entry: object) -> tuple[str | None, ...] | None:
        """Return an entry's medium and locality, each None for any; None if the entry has another form."""
        parts: list[str | None] = []
        for name, known in _PARTS.items():
            value = entry.get(name) if isinstance(entry, dict) else 0
            part = value.upper() if isinstance(value, str) else value
            if part is not None and part not in known:
                self._ignored("kv_load_tiers", entry)
                return None
            parts.append(part)
        return tuple(parts)

    def _ignored(self, name: str, value: object) -> None:
        if name not in self._warned:
            self._warned.add(name)
            log.warning(
                "request_limit_ignored",
                name=name,
                value=repr(value)[:200],
                allowed=_ALLOWED[name],
                note="further ones are ignored without a line",
            )


def _matches(wanted: tuple[str | None, ...], place: Place) -> bool:
    return all(each is None or each == part for each, part in zip(wanted, place, strict=False))
