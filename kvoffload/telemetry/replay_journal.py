"""A journal that carries enough to make a core decide the same again.

Beside what every journal has, the file's first line has the engine's shape and the policy, each fact's line the fact in full
and what the device was asked while it was handled, and each question to the core has a line with its answer. Readers of
other journals find all that they know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from kvoffload.bus.bus import Bus
from kvoffload.core.state import LoadResults, Policy
from kvoffload.model.engine import EngineShape
from kvoffload.model.facts import Fact
from kvoffload.model.ids import BlockKey, RequestId
from kvoffload.model.transfer import TransferPlan
from kvoffload.telemetry.journal import Entry, Journal, line_of
from kvoffload.telemetry.records import Summary, to_plain
from kvoffload.telemetry.replay_form import FORMAT, KeyNumbers, write

HEADER, QUESTION, REPLAY = "ReplayBegins", "CoreAsked", "replay"
"""Names of the two lines that other journals lack, and of the field that a fact's line has more."""

KEYS = tuple[tuple[BlockKey, ...], ...]
LOOKUP: dict[str, object] = {
    "request": RequestId,
    "device_tokens": int,
    "may_wait": bool,
    "tokens": int,
    "new_keys": KEYS,
    "least_tokens": int,
}
"""A lookup's arguments and their types."""

ANSWERS: dict[str, object] = {"lookup": int | None, "plan": TransferPlan, "take_results": LoadResults}
"""Questions to a core, and the types of their answers."""

LineCallback = Callable[[str], object]


class ReplayJournal(Journal):
    """Takes the same arguments. Everything in full is written inline, so it costs several times as much."""

    def __init__(self, *args: Any, **settings: Any) -> None:  # noqa: ANN401  # handed through
        super().__init__(*args, **settings)
        self._at_a_time = 1  # what the device was asked belongs to the fact that was told last
        self._keys = KeyNumbers()
        self._asked: list[list[object]] = []  # of the device, since the last line that says so
        self._follower: LineCallback | None = None
        self._header: Entry | None = None

    def begin(self, shape: EngineShape, policy: Policy) -> None:
        """Say what engine it is; before any fact."""
        fields = {
            "format": FORMAT,
            "version": version("kvoffload"),
            "shape": write(shape, EngineShape, self._keys),
            "policy": write(policy, Policy, self._keys),
        }
        self._header = self._numbered(Summary(HEADER, fields))

    def subscribe(self, bus: Bus, capacity: int = 16384) -> None:
        super().subscribe(bus, capacity)
        if self._feed is not None and self._header is not None:
            self._feed.offer(self._header)

    def follow(self, follower: LineCallback) -> None:
        """Hand every line of the file to `follower`, at once, also without a file; from the first one on."""
        self._follower = follower
        if self._header is not None:
            follower(line_of(self._header))

    def device_asked(self, question: str, *values: object) -> None:
        """The core asked the device: its arguments, and what it answered, if anything."""
        self._asked.append([question, *values])

    def key_number(self, key: BlockKey | None) -> int | None:
        """Return what stands for a key."""
        return None if key is None else self._keys.of(key)

    def core_asked(
        self, question: str, arguments: dict[str, object], answer: object, error: Exception | None
    ) -> None:
        """The core was asked: what it answered, or that it raised."""
        written = {name: write(value, LOOKUP[name], self._keys) for name, value in arguments.items()}
        fields = {
            "question": question,
            "arguments": written,
            "answer": write(answer, ANSWERS[question], self._keys) if error is None else None,
            "raised": None if error is None else type(error).__name__,
            "device": self._take_asked(),
        }
        self._hand_out(self._numbered(Summary(QUESTION, fields)))

    def _for_file(self, entry: Entry, message: object) -> None:
        if isinstance(message, Fact):
            in_full = {"fact": write(message, type(message), self._keys), "device": self._take_asked()}
            name, kept = type(message).__name__, to_plain(entry.message)
            del kept["event"]
            entry = entry._replace(message=Summary(name, {**kept, REPLAY: in_full}))
        self._hand_out(entry)

    def _hand_out(self, entry: Entry) -> None:
        if self._feed is not None:
            self._feed.offer(entry)
        if self._follower is not None:
            self._follower(line_of(entry))

    def _take_asked(self) -> Sequence[object]:
        asked, self._asked = self._asked, []
        return asked
