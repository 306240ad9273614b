"""The form that travels: plain, mergeable, and the same after any transport."""

from __future__ import annotations

import json

from kvoffload.telemetry.catalogue import CATALOGUE
from kvoffload_vllm import payload
from kvoffload_vllm.payload import is_empty, merge, split_labels, summarize


def sent() -> payload.Payload:
    return {
        "counts": {
            "kvoffload_lookup_tokens_total": {"hit": 30, "miss": 10},
            "kvoffload_resets_total": {"": 1},
        },
        "gauges": {"kvoffload_slots": {"host,ready": 4}},
        "samples": {"kvoffload_transfer_seconds": {"host,load": [0.5]}},
    }


def test_no_label_value_has_the_sign_that_joins_them() -> None:
    for metric in CATALOGUE:
        for labels in metric.series:
            assert split_labels(",".join(labels)) == labels


def test_a_payload_without_numbers_is_empty() -> None:
    assert is_empty({})
    assert is_empty({"counts": {}})
    assert not is_empty(sent())


def test_counters_and_samples_add_up_and_of_gauges_the_later_holds() -> None:
    one, later = sent(), sent()
    later["gauges"]["kvoffload_slots"]["host,ready"] = 2
    before = json.dumps(later)
    merge(one, later)
    assert one["counts"]["kvoffload_lookup_tokens_total"] == {"hit": 60, "miss": 20}
    assert one["counts"]["kvoffload_resets_total"] == {"": 2}
    assert one["gauges"]["kvoffload_slots"] == {"host,ready": 2}
    assert one["samples"]["kvoffload_transfer_seconds"] == {"host,load": [0.5, 0.5]}
    merge(one, later)
    assert json.dumps(later) == before


def test_merging_into_nothing_shares_nothing() -> None:
    empty: payload.Payload = {}
    later = sent()
    before = json.dumps(later)
    merge(empty, later)
    merge(empty, later)
    assert json.dumps(later) == before
    assert empty["counts"]["kvoffload_resets_total"] == {"": 2}


def test_a_line_of_log() -> None:
    assert summarize(sent()) == {
        "hit_tokens": 30,
        "hit_percent": 75.0,
        "stored_blocks": 0,
        "loaded_blocks": 0,
        "failed_load_blocks": 0,
        "stored_mib": 0.0,
        "loaded_mib": 0.0,
        "evicted_blocks": 0,
    }


def test_failed_loads_are_those_that_neither_arrived_nor_were_taken_back() -> None:
    loads = {"loaded": 5, "failed": 2, "corrupt": 1, "cancelled": 4}
    line = summarize({"counts": {"kvoffload_load_blocks_total": loads}})
    assert (line["loaded_blocks"], line["failed_load_blocks"]) == (5, 3)
