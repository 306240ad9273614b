"""The connector, with copies that wait at a gate before they begin. The engines' processes import this
module.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvoffload.transfer import host_copier
from kvoffload.transfer.pump import TransferPump
from kvoffload_vllm import connector
from tests.vllm.copy_gate import CLOSED, CLOSED_EARLY, CLOSING, COPY, DONE, knock

if TYPE_CHECKING:
    from kvoffload.transfer.runs import CopyRuns

_running: set[int] = set()
_close = TransferPump.close


class KVOffloadConnector(connector.KVOffloadConnector):
    """Tells the gate when vLLM has closed a worker, and whether one of that worker's copies was still
    running.
    """

    def shutdown(self) -> None:
        super().shutdown()
        if self.role is KVConnectorRole.WORKER:
            knock(CLOSED_EARLY if _running else CLOSED).close()


def copy(runs: CopyRuns) -> None:
    _running.add(id(runs))
    with knock(COPY) as gate:
        gate.recv(1)
        host_copier.copy_by_memmove(runs)
        _running.remove(id(runs))
        with suppress(BrokenPipeError):  # an open gate does not wait for the copy
            gate.sendall(DONE)


async def close(pump: TransferPump) -> None:
    """Report to the gate that a worker waits for its copies, then close the pump."""
    knock(CLOSING).close()
    await _close(pump)


host_copier.choose_copy = lambda *, arena_is_target=False: copy
setattr(TransferPump, "close", close)  # noqa: B010  # by its name, as types know no other method there
