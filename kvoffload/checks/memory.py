"""Host memory: how much is needed, how much the machine and its cgroups have left, and the limits on pinning and swap."""

from __future__ import annotations

from kvoffload.checks.check import Check, Finding, Setup, go, no_go, not_known, warn
from kvoffload.checks.machine import Machine
from kvoffload.model.config import size_text
from kvoffload.transfer.footprint import arena_bytes
from kvoffload.transfer.host_memory import MemoryLimit, cgroup_limits, exceeded, machine_limit

_SPARE = 10  # a tenth of the memory should stay free
_SMALL_SHM = 256 * 2**20
_UNLIMITED = "unlimited"
_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # since torch 2.9, and before
_LESS = "lower host_bytes, or free memory"


def needed_bytes(setup: Setup) -> tuple[int, str] | None:
    """Return the host memory of all ranks on this machine, after rounding, and a text for it; None if unknown."""
    config = setup.config
    if config is None:
        return None
    ranks = setup.ranks
    if ranks is None:
        if config.host_bytes_per_rank is not None:
            return None
        return config.host_bytes, f"{size_text(config.host_bytes)} of all ranks"
    share = config.bytes_per_rank(ranks)
    total = ranks * (arena_bytes(share, _pages(setup)) if setup.block_bytes else share)
    return total, f"{size_text(total)} of {ranks} {'rank' if ranks == 1 else 'ranks'}"


def _pages(setup: Setup) -> tuple[int, ...]:
    """Return the pages to round by; if the size of only one is known, rounding by the block is close enough."""
    block = setup.block_bytes or 0
    return setup.page_bytes if sum(setup.page_bytes) == block else (block,)


def _machine(setup: Setup, machine: Machine) -> Finding:
    limit = machine_limit(machine.read)
    if limit.left is None:
        return not_known("the available memory: /proc/meminfo cannot be read")
    return _compare(setup, limit, limit.left)


def _cgroup(setup: Setup, machine: Machine) -> Finding:
    groups = list(cgroup_limits(machine.read))
    if not groups:
        return not_known("the memory limits of cgroups: none of this process can be read")
    limited = [group for group in groups if group.left is not None]
    if not limited:
        return go("no cgroup limits memory")
    least = min(limited, key=lambda group: group.left or 0)
    return _compare(setup, least, least.left or 0)


def _compare(setup: Setup, limit: MemoryLimit, left: int) -> Finding:
    needed = needed_bytes(setup)
    if needed is None:
        return _compare_one(setup, limit, left)
    count, words = needed
    if exceeded(count, [limit]):
        return no_go(f"{words} are more than {limit}", _LESS)
    if count > left - left // _SPARE:
        return warn(f"{words} leave less than a tenth of {limit}; the engine itself needs some too", _LESS)
    return go(f"{words} fit {limit}")


def _compare_one(setup: Setup, limit: MemoryLimit, left: int) -> Finding:
    """Compare one rank's share, because the number of ranks is not known."""
    if setup.config is None or setup.config.host_bytes_per_rank is None:
        return not_known(f"how much of {limit} is needed: the settings cannot be used")
    share = setup.config.host_bytes_per_rank
    if exceeded(share, [limit]):
        return no_go(f"one rank's {size_text(share)} are more than {limit}", _LESS)
    return not_known(
        f"how many ranks there are, of {size_text(share)} each; {limit} are enough for {left // share}",
        "give --ranks",
    )


def _shared_memory(setup: Setup, machine: Machine) -> Finding:
    space = machine.space("/dev/shm")
    if space is None:
        return warn("there is no /dev/shm, which the ranks of an engine communicate through", "mount one")
    size = f"/dev/shm has {size_text(space.total)}, {size_text(space.free)} of them free"
    if setup.ranks == 1 or space.free >= _SMALL_SHM:
        return go(f"{size}; host blocks are not there")
    ranks = "several ranks" if setup.ranks is None else f"{setup.ranks} ranks"
    return warn(
        f"{size}; host blocks are not there, but the ranks of an engine of {ranks} communicate through it",
        "give the container more (docker: --shm-size=1g, or --ipc=host), or empty it",
    )


def _expandable_segments(_: Setup, machine: Machine) -> Finding:
    for name in _ALLOCATOR_SETTINGS:
        if "expandable_segments:true" in machine.environ.get(name, "").replace(" ", "").lower():
            return warn(
                f"{name} asks for expandable segments: a copy may then span several allocations of the driver, "
                "which is not proven to work in batches",
                f"leave expandable_segments out of {name}",
            )
    return go("torch's memory lies in whole allocations")


def _locked_memory(setup: Setup, machine: Machine) -> Finding:
    if not _pins(setup, machine):
        return go("without a CUDA device nothing is pinned, so the limit on locked memory does not matter")
    limit = _soft_limit(machine.read("/proc/self/limits"))
    if limit is None:
        return not_known("the limit on locked memory: /proc/self/limits cannot be read")
    needed = needed_bytes(setup)
    if limit == _UNLIMITED or (needed is not None and int(limit) >= needed[0]):
        return go(f"the limit on locked memory is {limit if limit == _UNLIMITED else size_text(int(limit))}")
    much = "host memory" if needed is None else needed[1]
    return warn(
        f"at most {size_text(int(limit))} may be locked, and {much} will be pinned; whether the driver's pinning counts "
        "against the limit is not known here",
        "ulimit -l unlimited (systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1)",
    )


def _swap(setup: Setup, machine: Machine) -> Finding:
    text = machine.read("/proc/swaps")
    if text is None:
        return not_known("whether swap is on: /proc/swaps cannot be read")
    areas = [line.split()[0] for line in text.splitlines()[1:] if line.split()]
    if not areas:
        return go("no swap is on")
    if _pins(setup, machine):
        what = "host blocks are pinned and stay in memory, but the engine's own memory may be swapped out instead"
    else:
        what = "host blocks are not pinned, so they may be swapped out, and loading one then reads a disk"
    return warn(f"swap is on ({', '.join(areas)}): {what}", "swapoff -a, or vm.swappiness=0")


def _pins(setup: Setup, machine: Machine) -> bool:
    return setup.pins if setup.pins is not None else bool(machine.gpus().found)


def _soft_limit(limits: str | None) -> str | None:
    name = "Max locked memory"
    for line in (limits or "").splitlines():
        words = line.removeprefix(name).split()
        if line.startswith(name) and words and (words[0] == _UNLIMITED or words[0].isdecimal()):
            return words[0]
    return None


CHECKS = (
    Check("machine memory", _machine),
    Check("cgroup memory", _cgroup),
    Check("locked memory", _locked_memory),
    Check("swap", _swap),
    Check("expandable segments", _expandable_segments),
)
SHARED_MEMORY = Check("shared memory", _shared_memory)
"""Not checked at the start, when the engine's ranks are already connected."""
