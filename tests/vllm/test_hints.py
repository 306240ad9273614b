"""What the scheduler makes of the hints that clients give for one request."""

from __future__ import annotations

from typing import Any

import pytest

from kvoffload_vllm.hints import session_number
from tests.vllm.engine_rig import MARKS
from tests.vllm.scheduler_rig import BLOCK, adapter, make_request

pytestmark = MARKS


@pytest.mark.parametrize(
    ("hints", "own_id", "session", "is_last"),
    [
        (None, None, None, False),
        (None, "vllm's", "vllm's", False),
        ({"session": "a", "last_turn": True}, "vllm's", "a", True),
        ({"last_turn": True}, "vllm's", "vllm's", True),
        ({"last_turn": True}, None, "r", True),
    ],
)
def test_a_request_belongs_to_the_session_that_its_client_names(
    hints: Any,  # what a client may send
    own_id: str | None,
    session: str | None,
    is_last: bool,
) -> None:
    with adapter(BLOCK) as (scheduler, _):
        request = make_request("r", range(40))
        request.kv_transfer_params = {"kvoffload": hints}
        request.session_id = own_id
        scheduler.on_new_request(request)
        record = scheduler.offload.core.state.requests.live["r"]
        assert (record.session, record.is_last_turn) == (
            0 if session is None else session_number(session),
            is_last,
        )
