"""What neighbours that store and evict all the time cost an engine's hooks, counted in calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from kvoffload.model.wire import Tier
from kvoffload.runtime.node_catalog import FOLLOW_S, SCAN_S, NodeCatalog
from tests.operations import calls
from tests.reference.rig import BLOCK, Rig, rig, text

HOOKS = ("seen", "lookup", "allocated", "step", "reported", "take_answers", "ended")
BLOCKS = 10  # of a prompt
ROUNDS, HOST_BLOCKS = 4, 3 * BLOCKS  # so that all engines evict


@contextmanager
def engines(count: int) -> Iterator[list[Rig]]:
    """Start engines with one `host_path`."""
    with ExitStack() as running:
        folder = running.enter_context(TemporaryDirectory(dir="/dev/shm"))
        options: dict[str, Any] = {"host_blocks": HOST_BLOCKS, "extra": {"host_path": folder}}
        made = [running.enter_context(rig("full", **options)) for _ in range(count)]
        for each in made:
            each.drain()
        yield made


def counting(made: Rig, patch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of calls of each hook of an engine from now on."""
    found: list[int] = []

    def counted(hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: object, **named: object) -> object:
            results: list[object] = []
            found.append(calls(lambda: results.append(hook(*arguments, **named))))
            return results[0]

        return call

    for name in HOOKS:
        patch.setattr(made.offload, name, counted(getattr(made.offload, name)))
    return found


def hook_calls(made: Rig, neighbours: Sequence[Rig], patch: pytest.MonkeyPatch) -> int:
    """Serve new and returning prompts while neighbours serve others; return how many calls the engine's hooks make."""
    catalog = made.offload.catalogs[Tier.NODE]
    assert isinstance(catalog, NodeCatalog)
    made.pass_time(SCAN_S + FOLLOW_S)
    with patch.context() as within:
        found = counting(made, within)
        for number in range(ROUNDS):
            for place, neighbour in enumerate(neighbours, 1):
                neighbour.submit(text(1000 * place + number, BLOCKS * BLOCK))
                neighbour.drain()
            made.pass_time(2 * FOLLOW_S)
            made.run(text(number, BLOCKS * BLOCK))
            made.forget_device()
            made.run(text(max(number - 2, 0), BLOCKS * BLOCK))
    assert [len(each) > BLOCKS for each in catalog.neighbours.values()] == [True] * len(neighbours)
    assert made.count("load_blocks", "loaded") > 0
    return sum(found)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_hooks_beside_seven_busy_neighbours_make_at_most_a_twentieth_more_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    for neighbours in (0, 0, 7):  # the first engine in a process makes extra calls
        with engines(1 + neighbours) as made:
            found.append(hook_calls(made[0], made[1:], monkeypatch))
    _, alone, beside = found
    assert alone < beside <= 1.05 * alone, found
