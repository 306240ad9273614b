"""The engine's conservation laws, checked over its whole state."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvoffload.engine.request import Request, RequestState

if TYPE_CHECKING:
    from kvoffload.engine.block_pool import BlockPool
    from kvoffload.engine.capacity import Capacity
    from kvoffload.engine.scheduler import Scheduler


def audit(scheduler: Scheduler, pool: BlockPool, capacity: Capacity) -> list[str]:
    """Every broken law as text; none for a sound engine, at any time between two steps."""
    holders = (*scheduler.running, *scheduler.loading.values())
    held = Counter(block for request in holders for table in request.tables for block in table if block)
    found = pool.audit(held)
    for request in holders:
        found += _table_problems(request, capacity)
    for request in scheduler.waiting:
        if request.state is not RequestState.WAITING or any(request.tables):
            found.append(f"request {request.request_id} waits as {request.state.value} with blocks")
    return found


def _table_problems(request: Request, capacity: Capacity) -> list[str]:
    counts = [sum(1 for block in table if block) for table in request.tables]
    found = [
        f"request {request.request_id} holds {count} blocks in group {group.index}, over its bound"
        for group, count in zip(capacity.groups, counts, strict=True)
        if count > capacity.group_blocks(group, request.max_kv_tokens)
    ]
    if sum(counts) != request.held_blocks:
        found.append(f"request {request.request_id} holds {sum(counts)} blocks, counts {request.held_blocks}")
    return found
