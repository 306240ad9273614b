from __future__ import annotations

from typing import Any

import pytest

from kvoffload.model.facts import NO_LIMITS
from kvoffload.model.wire import LOWER_TIERS, Tier
from kvoffload_vllm.limits import LimitReader
from kvoffload_vllm.places import PLACES


def at(**where: str) -> set[Tier]:
    """Return the lower tiers that have these words in vLLM's events."""
    return {tier for tier in LOWER_TIERS if where.items() <= PLACES[tier].where.items()}


@pytest.mark.parametrize(
    ("entries", "tiers"),
    [
        ([], set()),
        ([{}], {*LOWER_TIERS}),
        ([{"medium": "cpu"}], at(medium="CPU")),
        ([{"medium": "Storage"}], at(medium="STORAGE")),
        ([{"locality": "local"}], at(locality="LOCAL")),
        ([{"medium": "STORAGE", "locality": "REMOTE"}], at(medium="STORAGE", locality="REMOTE")),
        ([{"medium": "CPU", "locality": "REMOTE"}], at(medium="CPU", locality="REMOTE")),
        ([{"medium": "CPU"}, {"locality": "REMOTE", "more": 1}], at(medium="CPU") | at(locality="REMOTE")),
        ([{"medium": None, "locality": "LOCAL"}], at(locality="LOCAL")),
        ([{"medium": "tape"}, {"locality": "LOCAL"}], at(locality="LOCAL")),
        ([{"medium": "tape"}], None),
        ([7, "CPU", {"locality": 3}], None),
        ({"medium": "CPU"}, None),
        ("CPU", None),
        (None, None),
    ],
)
def test_tiers_are_named_as_in_vllms_own_connector(entries: object, tiers: set[Tier] | None) -> None:
    expected = None if tiers is None else tuple(tier for tier in LOWER_TIERS if tier in tiers)
    assert LimitReader().read({"kv_load_tiers": entries}).tiers == expected


@pytest.mark.parametrize("value", [True, False, -1, 1.0, "8", [], {}, None])
def test_only_a_non_negative_integer_limits_tokens(value: object) -> None:
    limits = LimitReader().read({"max_load_tokens": value, "max_offload_tokens": value})
    assert (limits.load_tokens, limits.store_tokens) == (None, None)


@pytest.mark.parametrize("params", [{}, {"do_remote_prefill": True}])
def test_a_request_without_limits_has_none(params: dict[str, Any]) -> None:
    assert LimitReader().read(params) is NO_LIMITS


def test_0_is_a_limit() -> None:
    limits = LimitReader().read({"max_load_tokens": 0, "max_offload_tokens": 0})
    assert (limits.load_tokens, limits.store_tokens) == (0, 0)
