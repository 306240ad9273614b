"""Finds out what the KV depends on, once for all tiers below the host: on the scheduler's side.

    made ─▶ first step ─▶ identity known ─▶ disk: folder locked ─▶ sent to the workers ─▶ their files are open ─▶ the index is read
                                         └▶ remote store: its generation is read ─▶ each job brings the namespace to the workers

Only the scheduler's process has the seed of the block hashes, and only after it was made. So that side alone reads the weights,
on a thread of the tier that asks first, and the workers use the identity that it has found.
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


class Identification:
    """Finds out on the scheduler's side what the KV depends on.

    Args:
        find: returns the identity of the engine's KV, once vLLM hashes blocks; may read all weights.
    """

    def __init__(self, find: Callable[[], KVIdentity]) -> None:
        self._find = find
        self._found: KVIdentity | None = None
        self._finding = threading.Lock()
        self._stepped = threading.Event()
        self._is_closed = False
        self._is_sent = False

    def identify(self) -> KVIdentity:
        """Return the identity; on a tier's thread, which waits for the first step and for the weights to be read.

        Raises:
            CancelledError: the engine stops before.
            DiskError: the identity cannot be determined.
        """
        self._stepped.wait()
        with self._finding:
            if self._is_closed:
                raise CancelledError
            if self._found is None:
                self._found = self._find()
            return self._found

    def step(self, offload: SchedulerSide) -> KVIdentity | None:
        """A step begins: return the identity once, when this engine has locked the disk's folder that is named by it."""
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
