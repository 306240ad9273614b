"""The hints that a client gives for one request in `kv_transfer_params`, under the key `kvoffload`.

    session      a string: the session, such as an agent's run, of which the request is a turn
    last_turn    true or false: whether the session ends with this request

Without `session`, vLLM's own session id counts; without both, a last turn is a session by itself. A value of another
form and an unknown key are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple
from zlib import crc32

from kvoffload.logs import get_logger

log = get_logger("scheduler")

_KINDS = {"session": (str, "a string"), "last_turn": (bool, "true or false")}


class Hints(NamedTuple):
    session: str | None = None
    is_last_turn: bool = False


NO_HINTS = Hints()


def session_number(name: str) -> int:
    """Return a number above 0 for a session. The name itself, which clients choose, stays out of the journal."""
    return crc32(name.encode(errors="surrogatepass")) or 1


class HintReader:
    """Reads requests' hints. Logs the first value of each name that has another form, and the first unknown key."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def read(self, params: Mapping[str, Any]) -> Hints:
        """Return the hints in a request's `kv_transfer_params`."""
        hints = params.get("kvoffload")
        if hints is None:
            return NO_HINTS
        if not isinstance(hints, dict):
            self._ignored("kvoffload", hints, "an object with " + " and ".join(_KINDS))
            return NO_HINTS
        for key in hints.keys() - _KINDS.keys():
            self._ignored("unknown", key, " and ".join(_KINDS))
        return Hints(self._value(hints, "session"), self._value(hints, "last_turn") or False)

    def _value(self, hints: Mapping[str, Any], name: str) -> Any:  # noqa: ANN401  # the kind depends on the name
        value, (kind, allowed) = hints.get(name), _KINDS[name]
        if value is None or type(value) is kind:
            return value
        self._ignored(name, value, allowed)
        return None

    def _ignored(self, name: str, value: object, allowed: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            log.warning(
                "request_hint_ignored",
                name=name,
                value=repr(value)[:200],
                allowed=allowed,
                note="further ones are ignored without a line",
            )
