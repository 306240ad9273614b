"""A device that answers from the record."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from kvoffload.model.ids import BlockKey, DeviceBlockId
from kvoffload.telemetry.replay_form import key_of


class Diverged(Exception):
    """Raised when the core asks, or decides, other than it did when it was recorded.

    Args:
        recorded: what the journal has.
        replayed: what there is instead.
    """

    def __init__(self, recorded: object, replayed: object) -> None:
        self.recorded, self.replayed = recorded, replayed
        super().__init__(f"first difference\n  recorded: {recorded}\n  replayed: {replayed}")


class AnsweringDevice:
    """Expects the questions of one line after the other, in their order."""

    def __init__(self) -> None:
        self._asked: deque[list[object]] = deque()

    def expect(self, asked: Iterable[object]) -> None:
        """Take a line's questions with their answers.

        Raises:
            ValueError: they are not what a journal has.
        """
        self._asked = deque()
        for each in asked:
            if not isinstance(each, list) or not each:
                raise ValueError(f"{each!r} is no question to the device")
            self._asked.append(each)

    def check_done(self) -> None:
        """Make sure that everything was asked.

        Raises:
            Diverged: something was not.
        """
        if self._asked:
            raise Diverged(_call(self._asked[0]), "the device is not asked")

    def lease(self, blocks: Sequence[DeviceBlockId]) -> None:
        self._next("lease", list(blocks))

    def release(self, blocks: Sequence[DeviceBlockId]) -> None:
        self._next("release", list(blocks))

    def next_evictable(self, count: int) -> Iterable[DeviceBlockId]:
        blocks = self._next("next_evictable", count)
        if not isinstance(blocks, list):
            raise ValueError(f"{blocks!r} is no list of blocks")
        return [DeviceBlockId(block) for block in blocks]

    def free_blocks(self) -> int:
        count = _number(self._next("free_blocks"))
        assert count is not None
        return count

    def key_of(self, block: DeviceBlockId) -> BlockKey | None:
        number = _number(self._next("key_of", block))
        return None if number is None else key_of(number)

    def block_of(self, key: BlockKey) -> DeviceBlockId | None:
        number = _number(self._next("block_of", int(key)))
        return None if number is None else DeviceBlockId(number)

    def _next(self, question: str, *arguments: object) -> object:
        """Return the recorded answer, None for a question without one."""
        asked = [question, *arguments]
        recorded = self._asked.popleft() if self._asked else None
        if recorded is None or recorded[: len(asked)] != asked:
            raise Diverged(_call(recorded) if recorded else "the device is not asked", _call(asked))
        return recorded[len(asked)] if len(recorded) > len(asked) else None


def _call(asked: Sequence[object]) -> str:
    return f"device.{asked[0]}({', '.join(map(str, asked[1:]))})"


def _number(value: object) -> int | None:
    if value is not None and type(value) is not int:
        raise ValueError(f"{value!r} is no number")
    return value
