from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvoffload.core.owners import Owners
from tests.core.audit import by_key

KEYS = st.lists(st.integers(0, 7), unique=True, max_size=6)


@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "pop"]), KEYS, st.sampled_from("abcd"))))
def test_each_key_has_its_owners_in_the_order_in_which_they_came(
    steps: list[tuple[str, list[int], str]],
) -> None:
    owners, model = Owners[int, str](), dict[int, list[str]]()
    for what, keys, owner in steps:
        owned = [key for key in keys if owner in model.get(key, ())]
        if what == "pop":
            assert [list(owners.pop(key)) for key in keys] == [model.pop(key, []) for key in keys]
        elif what == "add":
            fresh = [key for key in keys if key not in owned]
            owners.add(fresh, owner)
            for key in fresh:
                model.setdefault(key, []).append(owner)
        else:
            owners.remove(keys, owner)
            for key in owned:
                model[key].remove(owner)
            model = {key: each for key, each in model.items() if each}
        assert by_key(owners) == model
        assert len(owners) == len(model)
