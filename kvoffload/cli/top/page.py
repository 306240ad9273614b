"""The whole page: where the numbers come from, and the numbers."""

from __future__ import annotations

import time

from kvoffload.cli.top.server import State
from kvoffload.cli.top.view import Line, show


def page(url: str, state: State, interval_s: float, unix_now: float) -> list[Line]:
    """Return what the terminal shows. The last numbers stay while the server does not answer."""
    clock = time.strftime("%H:%M:%S", time.localtime(unix_now))
    restarts = f"restarted {state.restarts} times; " if state.restarts else ""
    lines = [
        Line(f"kvoffload top  {url}", heading=True),
        Line(f"{clock}, every {interval_s:g} s; {restarts}q ends"),
    ]
    if state.problem:
        old = "; these numbers are old" if state.change is not None else ""
        lines.append(Line(f"{state.problem}; trying again{old}", alarm=True))
    if state.change is None:
        return lines if state.problem else [*lines, Line("waiting for the first answer")]
    return [*lines, *show(state.change, unix_now)]
