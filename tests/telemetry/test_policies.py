from __future__ import annotations

import pytest

from kvoffload.model.ids import BlockKey
from kvoffload.telemetry import policies
from kvoffload.telemetry.policies import SAMPLE_BLOCKS, PolicyChoice
from tests.bench.policies import POLICIES, replay
from tests.bench.workloads import draw_workload

ALL = ("eager", "twice", "lazy")


def choice(device: float, host: float) -> PolicyChoice:
    made = PolicyChoice(ALL)
    made.set_sizes(device, host)
    return made


def ask(made: PolicyChoice, *prompts: str) -> None:
    """Report prompts; each character is a block, whose key depends on the blocks before it."""
    for prompt in prompts:
        keys = [BlockKey(prompt[: end + 1].encode()) for end in range(len(prompt))]
        made.request(keys, len(keys))


def test_each_policy_finds_what_its_tiers_have_after_the_same_requests() -> None:
    made = choice(device=2, host=3)
    ask(made, "a", "b", "c", "d", "e")  # eager has cde and the device de; lazy has abc on the host, too
    ask(made, "b")
    assert made.found() == pytest.approx({"eager": 0, "twice": 1 / 6, "lazy": 1 / 6})
    made = choice(device=1, host=3)
    ask(made, "a", "b", "c", "x", "y", "z", "a", "b", "c")
    assert made.found() == pytest.approx({"eager": 0, "twice": 3 / 9, "lazy": 0})


def test_a_prompt_is_found_up_to_its_first_missing_block() -> None:
    made = choice(device=0, host=4)
    ask(made, "abc", "xyz", "abcd")  # the host has evicted the deepest blocks of the first prompt
    assert made.found()["eager"] == pytest.approx(1 / 10)


def test_blocks_of_an_answer_are_used_with_their_prompt() -> None:
    made = choice(device=0, host=4)
    key = BlockKey(b"a")
    blocks = made.request([key], 1)
    made.grown(blocks, [BlockKey(b"ab")])
    ask(made, "ab")
    assert made.found()["eager"] == pytest.approx(2 / 3)


def test_a_hot_block_outside_the_sample_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """One block is looked up 1,000 times, each time before a block that never returns: half of all lookups find it."""
    sample, found = 512, []
    monkeypatch.setattr(policies, "SAMPLE_BLOCKS", sample)
    for seed in range(8):
        made = choice(device=0, host=4 * sample)
        for number in range(2 * sample):  # of so many blocks, only a share is in the sample
            made.request([BlockKey(b"%d %d" % (seed, number))], 0)
        assert made.rate < 0.6
        for number in range(1000):
            made.request([BlockKey(b"hot %d" % seed), BlockKey(b"other %d %d" % (seed, number))], 2)
        found.append(made.found()["eager"])
    assert found == pytest.approx([0.5] * 8, abs=0.25)


def test_a_reset_empties_the_miniatures() -> None:
    made = choice(device=4, host=4)
    ask(made, "a")
    made.forget()
    ask(made, "a")
    assert not any(made.found().values())


def documents(made: PolicyChoice, rounds: int, used: str = "eager", allowed: tuple[str, ...] = ALL) -> None:
    """Ask for a document again and again, among prompts that never return."""
    for number in range(rounds):
        for prompt in ("doc", *(f"{number}{each}" for each in "abcdef")):
            ask(made, prompt)
            made.decide(used, allowed)


def test_nothing_is_chosen_before_as_many_blocks_were_used_as_the_tiers_have() -> None:
    made = choice(device=10, host=90)
    documents(made, 4)
    assert made.chosen is None
    documents(made, 40)
    assert made.chosen is not None


@pytest.mark.parametrize(
    ("used", "allowed", "chosen"),
    [
        ("eager", ALL, "twice"),
        ("lazy", ALL, "twice"),
        ("twice", ALL, "twice"),
        ("lazy", ("eager", "lazy"), "lazy"),
    ],
)
def test_the_allowed_policy_that_finds_clearly_more_is_chosen(
    used: str, allowed: tuple[str, ...], chosen: str
) -> None:
    made = choice(device=3, host=9)
    documents(made, 60, used, allowed)
    assert made.chosen == chosen


@pytest.mark.parametrize(("more", "chosen"), [(0.0, "eager"), (0.009, "eager"), (0.011, "twice")])
def test_a_policy_stays_while_no_other_finds_a_hundredth_more(more: float, chosen: str) -> None:
    made = choice(device=3, host=9)
    for _ in range(400):
        ask(made, "doc")  # which all of them find
    made._miniatures["twice"].found += more * 3 * 400
    made.decide("eager", ALL)
    assert made.chosen == chosen


def test_recent_prompts_count_more_than_older_ones() -> None:
    made = choice(device=2, host=6)
    documents(made, 50)
    assert made.chosen == "twice"
    before = made.found()["twice"]
    for number in range(200):
        made.request([BlockKey(b"%d" % number)], 1)
        made.decide("twice", ALL)
    assert made.found()["twice"] < before / 4


def test_a_miniature_stays_within_its_sample_and_its_shares_stay_right() -> None:
    shares = []
    for blocks in (SAMPLE_BLOCKS // 4, SAMPLE_BLOCKS * 8):
        made = choice(device=blocks // 4, host=blocks)
        for number in (*range(blocks // 2), *range(blocks // 2), *range(4 * blocks)):
            made.request([BlockKey(b"%032d" % number)], 1)
        assert max(map(len, made._miniatures.values())) <= SAMPLE_BLOCKS
        shares.append(made.found())
    assert shares[0] == pytest.approx(shares[1], abs=0.03)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("workload", "requests", "device", "host", "above_worst"),
    [
        ("documents", 1500, 0.25, 0.5, 0.06),
        ("documents", 3000, 0.25, 1, 0.10),
        ("agents", 2000, 1, 0.5, 0.10),
        ("agents", 2000, 0.5, 2, 0.02),
        ("chats", 2500, 0.5, 0.5, 0.10),
        ("chats", 2500, 0.25, 2, 0.02),
    ],
)
def test_auto_finds_nearly_what_the_best_policy_finds(
    workload: str, requests: int, device: float, host: float, above_worst: float
) -> None:
    trace = draw_workload(workload, requests)
    found = {policy: replay(trace, policy, device, host).found for policy in POLICIES}
    auto = found.pop("auto")
    assert (
        auto >= max(found.values()) - 0.013
    )  # a point, and what the first requests cost, which find the host empty
    assert auto >= min(found.values()) + above_worst
