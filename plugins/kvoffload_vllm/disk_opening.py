"""How the disk opens on vLLM: the scheduler's side finds out what the KV depends on, and the workers are sent it.

    made ─▶ first step ─▶ identity known, folder locked ─▶ sent to the workers ─▶ their files are open ─▶ the index is read

Only the scheduler's process has the seed of the block hashes, and only after it was made. So that side alone reads the weights,
on the index's thread, and whatever it makes of them is what the workers have.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING

from kvoffload.disk.folder import DiskPlace

if TYPE_CHECKING:
    from pathlib import Path

    from kvoffload.disk.identity import KVIdentity
    from kvoffload.runtime.scheduler_side import SchedulerSide


class DiskOpening:
    """Finds out on the scheduler's side what the KV depends on.

    Args:
        root: `disk_path`.
        find: returns the identity of the engine's KV, once vLLM hashes blocks; may read all weights.
        replica: the engine's number among data-parallel ones.
    """

    def __init__(self, root: Path, find: Callable[[], KVIdentity], replica: int) -> None:
        self._find = find
        self._stepped = threading.Event()
        self._is_closed = False
        self._is_sent = False
        self.place = DiskPlace(root, self._identify, replica)

    def step(self, offload: SchedulerSide) -> KVIdentity | None:
        """A step begins: return the identity once, when this engine has locked the folder that is named by it."""
        if self._is_sent:
            return None
        self._stepped.set()
        identity = offload.disk_identity
        self._is_sent = identity is not None
        return identity

    def close(self) -> None:
        """The engine stops, perhaps before its first step."""
        self._is_closed = True
        self._stepped.set()

    def _identify(self) -> KVIdentity:
        self._stepped.wait()
        if self._is_closed:
            raise CancelledError
        return self._find()


class WorkersPlace:
    """Where a worker's file belongs, which the scheduler's side sends.

    Args:
        root: `disk_path`.
        replica: the engine's number among data-parallel ones.
    """

    def __init__(self, root: Path, replica: int) -> None:
        self._identity: Future[KVIdentity] = Future()
        self.place = DiskPlace(root, self._identity.result, replica)

    def sent(self, identity: KVIdentity) -> None:
        """The scheduler's side has locked the folder."""
        if not self._identity.done():
            self._identity.set_result(identity)

    def close(self) -> None:
        """The worker stops: the thread that waits for the identity ends."""
        self._identity.cancel()
