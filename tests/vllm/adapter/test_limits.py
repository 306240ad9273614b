from __future__ import annotations

from typing import Any

import pytest

from kvoffload.model.facts import NO_LIMITS
from kvoffload.model.wire import Tier
from kvoffload_vllm.limits import LimitReader

NODE, DISK, REMOTE = Tier.NODE, Tier.DISK, Tier.REMOTE


@pytest.mark.parametrize(
    ("entries", "tiers"),
    [
        ([], ()),
        ([{}], (NODE, DISK, REMOTE)),
        ([{"medium": "cpu"}], (NODE,)),
        ([{"medium": "Storage"}], (DISK, REMOTE)),
        ([{"locality": "local"}], (NODE, DISK)),
        ([{"medium": "STORAGE", "locality": "REMOTE"}], (REMOTE,)),
        ([{"medium": "CPU", "locality": "REMOTE"}], ()),
        ([{"medium": "CPU"}, {"locality": "REMOTE", "more": 1}], (NODE, REMOTE)),
        ([{"medium": None, "locality": "LOCAL"}], (NODE, DISK)),
        ([{"medium": "tape"}, {"locality": "LOCAL"}], (NODE, DISK)),
        ([{"medium": "tape"}], None),
        ([7, "CPU", {"locality": 3}], None),
        ({"medium": "CPU"}, None),
        ("CPU", None),
        (None, None),
    ],
)
def test_tiers_are_named_as_in_vllms_own_connector(entries: object, tiers: object) -> None:
    assert LimitReader().read({"kv_load_tiers": entries}).tiers == tiers


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
