from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvoffload.core.claims import Claims
from tests.core.audit import by_key

KEYS = st.lists(st.integers(0, 7), unique=True, max_size=6)


@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "pop"]), KEYS, st.sampled_from("abcd"))))
def test_each_key_has_its_claimants_in_the_order_in_which_they_came(
    steps: list[tuple[str, list[int], str]],
) -> None:
    claims, model = Claims[int, str](), dict[int, list[str]]()
    for what, keys, claimant in steps:
        claimed = [key for key in keys if claimant in model.get(key, ())]
        if what == "pop":
            assert [list(claims.pop(key)) for key in keys] == [model.pop(key, []) for key in keys]
        elif what == "add":
            fresh = [key for key in keys if key not in claimed]
            claims.add(fresh, claimant)
            for key in fresh:
                model.setdefault(key, []).append(claimant)
        else:
            claims.remove(keys, claimant)
            for key in claimed:
                model[key].remove(claimant)
            model = {key: each for key, each in model.items() if each}
        assert by_key(claims) == model
        assert len(claims) == len(model)
