"""The format of numbers sent to vLLM's front end: maps, lists, texts and numbers only. Pure.

    {"counts": {metric: {labels: added}}, "gauges": {metric: {labels: now}}, "samples": {metric: {labels: [seconds, ..]}}}

`labels` are a series' label values joined by commas. They come from enums, whose values have no comma.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvoffload.telemetry.changes import Change

Payload = dict[str, Any]

COUNTS, GAUGES, SAMPLES = "counts", "gauges", "samples"
_COMMA = ","
_MIB = 1 << 20


def to_payload(change: Change) -> Payload:
    """Return the message for a change; empty parts are left out."""
    parts: dict[str, Mapping[str, Mapping[tuple[str, ...], object]]] = {
        COUNTS: change.counts,
        GAUGES: change.gauges,
        SAMPLES: change.samples,
    }
    return {
        part: {
            name: {_COMMA.join(labels): value for labels, value in series.items()}
            for name, series in table.items()
        }
        for part, table in parts.items()
        if table
    }


def split_labels(joined: str) -> tuple[str, ...]:
    """Return the label values of a series."""
    return tuple(joined.split(_COMMA)) if joined else ()


def is_empty(payload: Mapping[str, Any]) -> bool:
    """Whether it holds no number."""
    return not any(payload.get(part) for part in (COUNTS, GAUGES, SAMPLES))


def merge(payload: Payload, later: Mapping[str, Any]) -> None:
    """Add a later message: counters add up, samples are appended, gauges are replaced. `later` is not changed."""
    for name, joined, added in _entries(later, COUNTS):
        series = _series(payload, COUNTS, name)
        series[joined] = series.get(joined, 0) + added
    for name, joined, now in _entries(later, GAUGES):
        _series(payload, GAUGES, name)[joined] = now
    for name, joined, samples in _entries(later, SAMPLES):
        series = _series(payload, SAMPLES, name)
        series[joined] = [*series.get(joined, ()), *samples]


def summarize(payload: Mapping[str, Any]) -> dict[str, int | float]:
    """Return the few numbers of an interval that belong into a line of log."""
    hit, missed = (_count(payload, "kvoffload_lookup_tokens_total", result) for result in ("hit", "miss"))
    return {
        "hit_tokens": hit,
        "hit_percent": round(100 * hit / (hit + missed), 1) if hit + missed else 0.0,
        "stored_blocks": _count(payload, "kvoffload_store_blocks_total", "stored"),
        "loaded_blocks": _count(payload, "kvoffload_load_blocks_total", "loaded"),
        "failed_load_blocks": _total(payload, "kvoffload_load_blocks_total")
        - _count(payload, "kvoffload_load_blocks_total", "loaded")
        - _count(payload, "kvoffload_load_blocks_total", "cancelled"),
        "stored_mib": round(_count(payload, "kvoffload_transfer_bytes_total", "host,store") / _MIB, 1),
        "loaded_mib": round(_count(payload, "kvoffload_transfer_bytes_total", "host,load") / _MIB, 1),
        "evicted_blocks": _total(payload, "kvoffload_evicted_blocks_total", "host,"),
    }


def _entries(payload: Mapping[str, Any], part: str) -> Iterator[tuple[str, str, Any]]:
    for name, series in payload.get(part, {}).items():
        for joined, value in series.items():
            yield name, joined, value


def _series(payload: Payload, part: str, name: str) -> dict[str, Any]:
    series: dict[str, Any] = payload.setdefault(part, {}).setdefault(name, {})
    return series


def _count(payload: Mapping[str, Any], name: str, joined: str) -> int:
    return int(payload.get(COUNTS, {}).get(name, {}).get(joined, 0))


def _total(payload: Mapping[str, Any], name: str, first: str = "") -> int:
    """Return the sum of a counter's series whose joined labels begin so."""
    series = payload.get(COUNTS, {}).get(name, {})
    return int(sum(value for joined, value in series.items() if joined.startswith(first)))
