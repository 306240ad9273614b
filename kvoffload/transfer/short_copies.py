"""Which copies of a batch are short: the kernel takes these, the copy engine the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvoffload.model.transfer import Direction
from kvoffload.transfer.runs import CopyRuns

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvoffload.transfer.runs import Numbers

Limits = Mapping[Direction, int]
"""By direction, bytes of a copy from which on it is not short."""

ENGINE_ONLY: Limits = dict.fromkeys(Direction, 0)
"""Every copy goes through the copy engine."""

KERNEL_COPIES = 8192
"""Copies that one launch makes."""

_ALIGNED = 16  # bytes of an address: others are slower than what `crossover.py` measures


def split(runs: CopyRuns, below: int, fewest: int) -> tuple[CopyRuns, CopyRuns]:
    """Return the runs for the kernel and those for the copy engine.

    Args:
        runs: of one batch.
        below: bytes of a run from which the engine is as fast; 0 keeps all for the engine.
        fewest: short copies for which a kernel is worth its launch.
    """
    is_short = (runs.size < below) & ((runs.target | runs.source) % _ALIGNED == 0)
    if int(is_short.sum()) < fewest:
        is_short[:] = False
    return _some(runs, is_short), _some(runs, ~is_short)


def _some(runs: CopyRuns, chosen: NDArray[np.bool_]) -> CopyRuns:
    parts: tuple[Numbers, ...] = (runs.source[chosen], runs.target[chosen], runs.size[chosen])
    return CopyRuns(*parts)
