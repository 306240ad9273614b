from __future__ import annotations

from hypothesis import strategies as st

from kvoffload.model import events
from kvoffload.model.causes import MissCause
from kvoffload.model.events import Event, FirstTokenReached, LookupAnswered
from kvoffload.model.wire import Tier

_CLASSES = [
    cls
    for cls in vars(events).values()
    if isinstance(cls, type) and issubclass(cls, Event) and cls not in (Event, LookupAnswered)
]
_FIELD_TYPES = {
    int: st.integers(0, 2**40),
    float: st.floats(0, 1e3),
    str: st.text(max_size=20),
    Tier: st.just(Tier.DISK),  # every event may be about the disk
}


_FETCHED = st.sampled_from([(), ((Tier.DISK, 7),), ((Tier.REMOTE, 9),), ((Tier.DISK, 1), (Tier.REMOTE, 2))])


@st.composite
def lookups(draw: st.DrawFn) -> LookupAnswered:
    """Draw a lookup's answer, which has a miss cause if and only if a block was looked up and missed."""
    missed, opted_out = draw(st.integers(0, 50)), draw(st.booleans())
    cause = draw(st.sampled_from(MissCause)) if missed and not opted_out else None
    number = st.integers(0, 1000)
    return LookupAnswered(
        request=draw(st.sampled_from(["a", "b"])),  # type: ignore[arg-type]
        device_tokens=draw(number),
        hit_blocks=draw(number),
        miss_blocks=missed,
        hit_tokens=draw(number),
        miss_tokens=draw(number),
        cause=cause,
        fetched=draw(_FETCHED),
        opted_out=opted_out,
    )


def any_event() -> st.SearchStrategy[Event]:
    for plain, strategy in _FIELD_TYPES.items():
        st.register_type_strategy(plain, strategy)
    first_tokens = st.builds(FirstTokenReached, fetched=_FETCHED)
    return st.one_of(lookups(), first_tokens, *(st.builds(cls) for cls in _CLASSES))
