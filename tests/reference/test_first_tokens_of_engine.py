"""The plugin's times to first token agree with the engine's, up to one step."""

from __future__ import annotations

from tests.reference.rig import STEP_S, Rig, text


def test_each_request_is_counted_by_what_was_found() -> None:
    rig = Rig()
    prompt = text(1, 40)
    for forget in (True, False, False):
        rig.run(prompt)
        if forget:
            rig.forget_device()
    counted = rig.counts().distributions["kvoffload_first_token_seconds"]
    assert {labels[0]: one.samples for labels, one in counted.items()} == {
        "host": 1,
        "device": 1,
        "nothing": 1,
    }
    first, second, third = (stream.stats for _, _, stream in rig.streams)
    for found, stats in (("nothing", first), ("host", second), ("device", third)):
        assert stats.first_token_s is not None
        known_s = stats.first_token_s - stats.arrived_s
        assert known_s <= counted[(found,)].total <= known_s + 2 * STEP_S
    assert not rig.offload.observation.first_tokens.admitted
    rig.close()


def test_an_answer_of_one_token_is_counted_at_its_end() -> None:
    rig = Rig()
    rig.run(text(2, 9), new_tokens=1)
    assert rig.counts().samples("kvoffload_first_token_seconds", "nothing") == 1
    rig.close()
