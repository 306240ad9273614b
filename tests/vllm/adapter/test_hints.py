from __future__ import annotations

import pytest

from kvoffload_vllm.hints import NO_HINTS, HintReader, Hints, session_number


@pytest.mark.parametrize(
    ("given", "hints"),
    [
        ({}, NO_HINTS),
        ({"session": "a", "last_turn": True}, Hints("a", is_last_turn=True)),
        ({"session": "a", "last_turn": False}, Hints("a")),
        ({"last_turn": True}, Hints(None, is_last_turn=True)),
        ({"session": 7, "last_turn": True}, Hints(None, is_last_turn=True)),
        ({"session": "a", "last_turn": 1}, Hints("a")),
        ({"session": "a", "last_turn": "true"}, Hints("a")),
        ({"session": "a", "keep_s": 3}, Hints("a")),
        ({3: 4}, NO_HINTS),
        (["session"], NO_HINTS),
        ("last_turn", NO_HINTS),
        (None, NO_HINTS),
    ],
)
def test_hints_of_another_form_are_ignored(given: object, hints: Hints) -> None:
    assert HintReader().read({"kvoffload": given}) == hints


def test_each_kind_of_ignored_hint_is_logged_once_with_what_is_allowed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reader = HintReader()
    for _ in range(3):
        reader.read({"kvoffload": {"session": 7, "last_turn": "yes", "keep_s": 3}})
        reader.read({"kvoffload": "x" * 1000})
    lines = sorted(line for line in caplog.text.splitlines() if "request_hint_ignored" in line)
    assert len(lines) == 4
    for allowed in (
        "a string",
        "true or false",
        "session and last_turn",
        "an object with session and last_turn",
    ):
        assert any(allowed in line for line in lines)
    assert max(map(len, lines)) < 600


def test_each_name_of_a_session_has_a_number_other_than_that_of_none() -> None:
    assert session_number("") == 1  # the checksum of the empty name is 0
    assert session_number("a") == session_number("a") not in (0, 1, session_number("b"))
