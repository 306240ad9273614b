from __future__ import annotations

from kvoffload.telemetry import payload
from kvoffload.telemetry.catalogue import CATALOGUE
from kvoffload.telemetry.payload import merge, split_labels, summarize


def sent() -> payload.Payload:
    return {
        "kvoffload_lookup_tokens_total": {"hit": 30, "miss": 10},
        "kvoffload_resets_total": {"": 1},
        "kvoffload_slots": {"host,ready": 4},
        "kvoffload_transfer_seconds": {"host,load": [0.5]},
    }


def test_label_values_survive_joining_and_splitting() -> None:
    for metric in CATALOGUE:
        for labels in metric.series:
            assert split_labels(",".join(labels)) == labels


def test_merging_adds_counters_and_samples_keeps_later_gauges_and_ignores_unknown_metrics() -> None:
    one, later = sent(), sent()
    later["kvoffload_slots"]["host,ready"] = 2
    merge(one, later)
    merge(one, {"kvoffload_of_tomorrow_total": {"x": 1}})
    assert one == {
        "kvoffload_lookup_tokens_total": {"hit": 60, "miss": 20},
        "kvoffload_resets_total": {"": 2},
        "kvoffload_slots": {"host,ready": 2},
        "kvoffload_transfer_seconds": {"host,load": [0.5, 0.5]},
    }
    merge(one, later)
    assert later == sent() | {"kvoffload_slots": {"host,ready": 2}}


def test_merging_into_an_empty_message_copies_it() -> None:
    empty: payload.Payload = {}
    later = sent()
    for _ in range(2):
        merge(empty, later)
    assert later == sent()
    assert empty["kvoffload_resets_total"] == {"": 2}


def test_a_message_is_summarized_for_a_log_line_in_which_cancelled_loads_have_not_failed() -> None:
    loads = {"loaded": 5, "failed": 2, "corrupt": 1, "cancelled": 4}
    assert summarize({**sent(), "kvoffload_load_blocks_total": loads}) == {
        "hit_tokens": 30,
        "hit_percent": 75.0,
        "stored_blocks": 0,
        "loaded_blocks": 5,
        "failed_load_blocks": 3,
        "stored_mib": 0.0,
        "loaded_mib": 0.0,
        "evicted_blocks": 0,
    }
