"""One colour a thing, the same as on the dashboards; a test compares them."""

from __future__ import annotations

COLOURS: dict[str, str] = {
    # where tokens of prompts came from
    "host": "#5aa64b", "device": "#4a86d0", "hit": "#5aa64b", "miss": "#9a9a9a",
    # the host's slots
    "pinned": "#5aa64b", "ready": "#4a86d0", "filling": "#7fb3ea", "draining": "#a06bc9", "quarantined": "#d44a3a",
    "empty": "#e4e4e4",
    # ways of copies
    "load": "#5aa64b", "store": "#4a86d0",
    # why blocks missed
    "never_seen": "#b8b8b8", "behind_miss": "#d6d6d6", "partial_block": "#8c8c8c", "last_token": "#a3a08c",
    "read_ahead": "#75736a", "evicted": "#e8862e", "storing": "#7fb3ea", "declined_host_full": "#c4601a",
    "declined_stale": "#d8b98a", "declined_lease_limit": "#e5c33b", "declined_other": "#b89b62", "lost": "#e0a0a0",
    "declined_not_ready": "#f0dd9a", "declined_stalled": "#a33b4f", "stalled": "#7d2438",
    "store_failed": "#b02a2a", "after_reset": "#a06bc9", "load_failed": "#e2685a", "load_declined": "#8a78c9",
    "opted_out": "#c9a0dc", "not_checked": "#f2c0b8", "corrupt": "#8b0000", "degraded": "#4d0f0f",
}  # fmt: skip
