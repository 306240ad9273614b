"""The lower tiers of an engine's core."""

from __future__ import annotations

from kvoffload.core.host import HostState
from kvoffload.core.tiers import DiskTier, RemoteTier
from kvoffload.model.wire import SlotsFile, Tier, TierStatus


def disk_of(state: HostState) -> DiskTier:
    disk = state.by_name[Tier.DISK]
    assert isinstance(disk, DiskTier)
    return disk


def remote_of(state: HostState) -> RemoteTier:
    assert state.asked is not None
    return state.asked


def statuses(file: SlotsFile | None = None, *, remote_works: bool | None = None) -> tuple[TierStatus, ...]:
    """Return what a rank reports about the tiers that it has."""
    disk = () if file is None else (TierStatus(Tier.DISK, True, file),)
    return disk if remote_works is None else (*disk, TierStatus(Tier.REMOTE, remote_works))
