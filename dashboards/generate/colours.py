"""The colour of every series, by the series' legend. All dashboards and the report's figures use the same colours.

Green: found or loaded. Blue: stored. Grey: harmless. Yellow and orange: not enough space. Red: failed. Purple: the
result of an operator's or a request's choice, such as a reset.
"""

from __future__ import annotations

from kvoffload.cli.figures import COLOURS as FIGURES
from kvoffload.model.wire import LOWER_TIERS, Tier

GREEN, RED, ORANGE, YELLOW, BLUE, GREY = "#5aa64b", "#d44a3a", "#e8862e", "#e5c33b", "#4a86d0", "#9a9a9a"


def of_tier(tier: Tier, colour: str) -> dict[str, str]:
    """Return the colours that follow from a tier's own: of its space, and of misses of blocks that only it has."""
    space = {f"{tier.value} total": colour, f"{tier.value} free": _lighter(colour)} if tier.has_slots else {}
    return space if tier.miss_cause is None else {**space, tier.miss_cause.value: colour}


def _lighter(colour: str) -> str:
    """Return the colour halfway between this one and white."""
    return "#" + "".join(f"{(int(colour[at : at + 2], 16) + 255) // 2:02x}" for at in (1, 3, 5))


COLOURS: dict[str, str] = {
    **FIGURES,
    # lookups, and the sources of tokens
    "hit": GREEN, "computed": "#b8b8b8", "host, as vLLM counts": "#8fce7f",
    # causes of misses
    "never_seen": "#b8b8b8", "no_state": "#c4a24a", "partial_block": "#8c8c8c", "last_token": "#a3a08c",
    "lookahead": "#75736a", "evicted": ORANGE, "storing": "#7fb3ea", "declined_host_full": "#c4601a",
    "declined_stale": "#d8b98a", "declined_lease_limit": YELLOW, "declined_other": "#b89b62", "declined_not_ready": "#f0dd9a",
    "declined_stalled": "#a33b4f", "stalled": "#7d2438", "tier_opening": "#93c3c7", "lost": "#e0a0a0",
    "store_failed": "#b02a2a", "after_reset": "#a06bc9", "load_failed": "#e2685a", "load_declined": "#8a78c9",
    "limited": "#9a86b8", "corrupt": "#8b0000", "no_room": "#f0b429", "seen_once": "#c9822e", "degraded": "#4d0f0f",
    "unsafe_hashes": "#5f4b8b",
    # outcomes of stores and loads
    "stored": BLUE, "loaded": GREEN, "done": GREEN, "already_cached": "#b8c9dd", "in_flight": "#7fb3ea",
    "stale": "#d8b98a", "not_hashed": "#8c8c8c", "host_full": "#c4601a", "not_ready": "#f0dd9a", "lease_limit": YELLOW,
    "request_gone": "#b8b8b8", "before_reset": "#a06bc9", "failed": RED, "abandoned": "#f2a499",
    "cancelled": "#c9a0dc", "open offers": "#7fb3ea",
    "open loads": "#8fce7f", "states stored": "#2f5f9e", "states loaded": "#2e6e2a",
    "prefix boundaries asked for": YELLOW, "prefix boundaries made": "#9fd08f", "avoidable": ORANGE, "declined": "#b8c9dd", "own_load": GREEN, "others_load": "#7fb3ea", "fetch": "#2f8f8f", "room": YELLOW,
    # a remote tier's answers, and the states of a lower tier
    "found": GREEN, "missing": GREY, "none": RED, "ask p50": "#7fb3ea", "ask p99": BLUE,
    "opening": YELLOW, "open": GREEN, "failing": ORANGE, "closed": RED,
    "timeout": YELLOW, "unreachable": ORANGE, "denied": "#a06bc9", "full": "#c4601a", "other": GREY,
    # store policies
    "eager": BLUE, "twice": GREEN, "lazy": YELLOW,
    # directions and jobs
    "store planned": "#c9d9ee", "store submitted": BLUE, "store abandoned": "#b02a2a",
    "load planned": "#cfe6c8", "load submitted": GREEN, "load abandoned": "#e2685a",
    "room for stores": BLUE,
    "store p50": "#7fb3ea", "store p99": BLUE, "load p50": "#8fce7f", "load p99": GREEN,
    # the host's slots
    "empty": "#e4e4e4", "pinned": GREEN, "draining": "#a06bc9",
    "quarantined": RED, "capacity": "#333333", "space": ORANGE, "spill_behind": "#c4601a", "reset": "#a06bc9",
    "leave early": "#a06bc9", "age p10": ORANGE, "age p50": YELLOW, "rewritten": BLUE,
    # bytes of host memory
    "wanted": "#b8b8b8", "reserved": BLUE, "used": GREEN,
    # causes for which pins were dropped
    "looked_up_again": GREY, "not_accepted": "#6b8e9e", "request_ended": "#b8b8b8",
    # seconds saved and lost
    "saved": GREEN, "waited": YELLOW, "interference": ORANGE, "net": BLUE, "break-even": GREY, "prefill": "#7fb3ea",
    # host memory in files
    "adopted": GREEN, "nothing_left": GREY, "table_refused": ORANGE, "other_kv": "#3f7fbf", "not_identified": "#c4601a",
    "adopted blocks": BLUE, "adopted and read": GREEN, "attach": BLUE, "stopped engines": GREY,
    # other engines' memory
    "neighbours": GREEN, "their blocks": BLUE, "torn": YELLOW, "gone": GREY,
    # health
    "loads failed": RED, "oldest pin": GREEN, "oldest job": BLUE, "audits": GREEN, "stale positions": "#d8b98a",
    # predictions, by capacity: from too small to large
    "0.25x": "#b8b8b8", "0.5x": YELLOW, "1x": BLUE, "2x": GREEN, "4x": "#2f8f8f", "8x": "#1f6f8f",
    "host_and_disk": "#2f8f8f", "margin": ORANGE, "seconds": BLUE, "measured": "#333333",
    # hooks, in the order of a step
    "seen": "#c9d9ee", "lookup": GREEN, "allocated": "#9fd08f", "step": BLUE, "ended": GREY,
    "report": YELLOW,
    # vLLM's own numbers
    "first token p50": "#7fb3ea", "first token p99": "#2f5f9e", "end to end p50": "#8fce7f", "end to end p99": "#2e6e2a",
    "running": GREEN, "waiting": YELLOW, "prompt": "#7fb3ea", "generated": GREEN, "preemptions": ORANGE, "device blocks in use": BLUE,
    "waiting_to_start": GREY, "in_progress": "#7fb3ea", "completed_waiting": YELLOW,
}  # fmt: skip

for tier in (Tier.HOST, *LOWER_TIERS):
    if tier.value in FIGURES:  # if not, `check_colours` says so
        COLOURS |= of_tier(tier, FIGURES[tier.value])

LIMITS = {"green": GREEN, "red": RED, "orange": ORANGE, "yellow": YELLOW, "grey": GREY}
"""The colours of numbers, by the names that panels use."""
