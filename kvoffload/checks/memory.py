"""Checks of host memory and GPUs: needed and available memory, files of host memory, limits, sizes, and the driver."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from kvoffload.checks.check import Check, Finding, Setup, fail, ok, unknown, warn
from kvoffload.checks.gpus import find_gpus
from kvoffload.model.config import size_text
from kvoffload.model.errors import ConfigError
from kvoffload.node.file_systems import (
    LARGER_POOL,
    LARGER_TMPFS,
    LARGEST_PAGE,
    check_pages,
    check_tmpfs,
    free_bytes,
    room_text,
)
from kvoffload.node.folder import Kept, list_kept
from kvoffload.transfer.arena import CHUNK_BYTES
from kvoffload.transfer.host_memory import (
    RESERVE,
    SMALL_HOST,
    exceeded,
    memory_limits,
    preferred_node,
    read_file,
    small_host_policy,
)

_SPARE = 10  # a tenth of the memory should stay free
_LESS = "lower host_bytes, or free memory"
_CONTAINERS_DEFAULT = 64 * 2**20  # of /dev/shm in Docker and Kubernetes
_GOOD_PAGE = 64 * 2**10
_BATCHED = 12080  # since this CUDA version, one driver call can copy many blocks

_CLIENT_BYTES = {"mooncake": 128 * 2**20, "s3": 300 * 2**20}
"""About how much memory a connection to a remote tier takes, by the scheme of its URL (docs/store.md, docs/limits.md)."""

SPEEDS = ((2 * 2**20, 0.85), (64 * 2**10, 0.8), (4 * 2**10, 0.5))
"""How fast scattered pages are copied in host memory, as a share of the speed of one large memcpy.

Each pair is a page size in bytes and the share measured for it; `tests/bench/README.md` has the measurements.
"""


def needed_bytes(setup: Setup) -> int:
    """Return how many bytes of host memory the engines on this machine need together.

    If a block's size is known, each rank's share is rounded down to whole blocks.
    """
    sizes = setup.sizes
    share = setup.config.host_bytes // setup.copies
    if sizes.block_bytes is not None:
        share -= share % sizes.block_bytes
    return sizes.engines * setup.copies * share


def _client_bytes(setup: Setup) -> int:
    """Return about how much memory the connections to a remote tier take: the scheduler has one, and each rank."""
    scheme = (setup.config.remote_url or "").partition(":")[0]
    return setup.sizes.engines * (1 + setup.sizes.ranks) * _CLIENT_BYTES.get(scheme, 0)


def _host_memory(setup: Setup) -> Finding:
    needed, before = needed_bytes(setup), _orphan_bytes(setup)
    if setup.config.host_hugetlbfs is not None:
        text = f'{size_text(needed)} come from the pool of huge pages, as "host path" says'
        if clients := _client_bytes(setup):
            text += f"; some {size_text(clients)} of connections to the remote tier were not compared with what is left"
        return ok(text)
    limits = memory_limits(read_file)
    if not limits:
        return unknown("the available memory: /proc/meminfo cannot be read")
    named = (
        f"{size_text(needed)}, of which the files of stopped engines have {size_text(min(before, needed))},"
    )
    text = named if before else size_text(needed)
    new = needed - before  # the start adopts or removes those files
    if (limit := exceeded(new, limits)) is not None:
        return fail(f"{text} are too much for {limit}: {size_text(RESERVE)} must stay free", _LESS)
    limit = min(limits, key=lambda one: one.left)
    if clients := _client_bytes(setup):
        text += f" and some {size_text(clients)} of connections to the remote tier"
    if new + clients > limit.left - limit.left // _SPARE:
        return warn(f"{text} leave less than a tenth of {limit}; the engine itself needs some too", _LESS)
    return ok(f"{text} fit {limit}")


# -- host memory in files --------------------------------------------------------------------------------------------


def _kept(setup: Setup) -> list[Kept]:
    """Return what engines keep below `host_path`; nothing without it."""
    return [] if setup.config.host_path is None else list_kept(setup.config.host_path)


def _orphan_bytes(setup: Setup) -> int:
    """Return how many bytes stopped engines keep where the ranks' memory will be."""
    return sum(each.size_with(setup.config.host_hugetlbfs) for each in _kept(setup) if each.is_orphan)


def _host_path(setup: Setup) -> Finding | None:
    """Compare what the engines need with what the tmpfs or the pool of huge pages has left, as the start does."""
    path, pages = setup.config.host_path, setup.config.host_hugetlbfs
    if path is None:
        return None
    try:
        check_tmpfs(path)
        if pages is not None:
            check_pages(pages)
        folder = next(one for one in (path, *path.absolute().parents) if one.exists())
    except (ConfigError, OSError) as error:  # this user may not look into a folder, or a name is too long
        return fail(
            str(error), "name a folder on a tmpfs in host_path, and one on a hugetlbfs in host_hugetlbfs"
        )
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        return fail(
            f"{folder} is not a folder in which this user can make files", "name another folder in host_path"
        )
    needed, left, before = needed_bytes(setup), free_bytes(pages or folder), _orphan_bytes(setup)
    place = _tmpfs(folder) if pages is None else f"the pool of {pages}"
    text = f"{place} has {room_text(left)}"
    if before:
        text += f", and {size_text(before)} of stopped engines, which the start adopts or removes"
    if needed > left + before:
        remedy = LARGER_TMPFS if pages is None else LARGER_POOL
        return fail(f"{size_text(needed)} do not fit: {text}", remedy)
    if pages is not None and (most := needed + _unused_bytes(setup, needed)) > left + before:
        whole = f"they need up to {size_text(most)}, because chunks end with a whole page"
        return warn(f"{size_text(needed)} may not fit, {whole}: {text}", LARGER_POOL)
    return ok(f"{size_text(needed)} fit: {text}")


def _unused_bytes(setup: Setup, needed: int) -> int:
    """Return the most bytes that huge pages have beyond host memory: one a chunk, and a header's for each rank."""
    copies = setup.sizes.engines * setup.copies
    return LARGEST_PAGE * (needed // (CHUNK_BYTES - LARGEST_PAGE) + 2 * copies)


def _tmpfs(folder: Path) -> str:
    """Return a tmpfs with its size."""
    found = os.statvfs(folder)
    size = found.f_blocks * found.f_frsize
    default = ", a container's default," if size == _CONTAINERS_DEFAULT else ""
    return f"the tmpfs of {folder}, of {size_text(size)}{default}" if size else f"the tmpfs of {folder}"


def _kept_memory(setup: Setup) -> Finding | None:
    """Say what engines keep below `host_path`, and compare the memory of stopped ones with its bound."""
    config = setup.config
    if config.host_path is None:
        return None
    kept = _kept(setup)
    orphans, used = (
        [each.size for each in kept if each.is_orphan],
        [each for each in kept if not each.is_orphan],
    )
    text = (
        f"stopped engines keep {size_text(sum(orphans))} in {len(orphans)} folders below {config.host_path}"
    )
    if used:
        pids = sorted({process.pid for each in used for process in each.owner.processes})
        text += (
            f"; engines that run have {size_text(sum(each.size for each in used))} (processes "
            f"{', '.join(map(str, pids))}), beside which this engine needs its own memory until they end"
        )
        text += ", and reads their blocks if their KV is equal" * config.node_share
    # The next engine adopts at most one folder, and the rest is bounded.
    rest = sum(orphans) - max(orphans, default=0)
    if rest > config.orphan_bytes:
        return warn(
            f"{text}; host_orphan_bytes lets {size_text(config.orphan_bytes)} stay, so the least recently used are removed "
            "ten minutes after the start",
            f"raise host_orphan_bytes, or remove them: kvoffload host-memory {config.host_path} --orphans",
        )
    return ok(text)


def _locked_memory(setup: Setup) -> Finding:
    if not setup.pins:
        return ok("without a CUDA device nothing is pinned, so the limit on locked memory does not matter")
    limit, needed = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], needed_bytes(setup)
    if limit < 0 or limit >= needed:
        return ok("the limit on locked memory is above what will be pinned")
    return warn(
        f"at most {size_text(limit)} may be locked, and {size_text(needed)} will be pinned; whether the driver's pinning "
        "counts against the limit is not known here",
        "ulimit -l unlimited (systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1)",
    )


def _swap(setup: Setup) -> Finding:
    areas = [line.split()[0] for line in (read_file("/proc/swaps") or "").splitlines()[1:] if line.split()]
    if not areas:
        return ok("no swap is on")
    what = "the engine's own memory" if setup.pins else "host blocks, which are not pinned,"
    return warn(
        f"swap is on ({', '.join(areas)}): {what} may be swapped out", "swapoff -a, or vm.swappiness=0"
    )


def _huge_pages(_: Setup) -> Finding:
    if "[never]" in (read_file("/sys/kernel/mm/transparent_hugepage/enabled") or ""):
        return warn(
            "transparent huge pages are off: host memory takes longer to pin, and scattered copies are slower",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    return ok("the kernel gives transparent huge pages to those who ask")


def _host_pool(setup: Setup) -> Finding:
    sizes, config = setup.sizes, setup.config
    if not sizes.block_bytes or not sizes.device_blocks:
        return _host_pool_by_bytes(setup)
    slots = config.host_bytes // setup.copies // sizes.block_bytes
    ratio = f"{slots:,} blocks on the host, {sizes.device_blocks:,} on the device"
    if setup.copies < sizes.ranks:
        ratio += f" (host_copies {setup.copies}: {sizes.sharers} ranks share one)"
    if slots == 0:
        return fail(
            f"{ratio}: one block takes {size_text(sizes.block_bytes)} on each rank", "raise host_bytes"
        )
    return _compared(setup, ratio, slots, sizes.device_blocks, sizes.block_bytes * sizes.device_blocks)


def _host_pool_by_bytes(setup: Setup) -> Finding:
    block, device = setup.sizes.block_bytes, setup.sizes.device_bytes
    if not device:
        lacking = "give --kv-cache-memory-bytes or --device-blocks" if block else "needs the model sizes"
        return unknown("whether the host holds more blocks than the device", lacking)
    host = setup.config.host_bytes // setup.copies
    ratio = f"{size_text(host)} on the host, {size_text(device)} on the device, on each rank (by bytes)"
    return _compared(setup, ratio, host, device, device)


def _compared(setup: Setup, ratio: str, host: int, device: int, device_bytes: int) -> Finding:
    """Return a finding about the host pool.

    Args:
        setup: what is known before the start.
        ratio: the two sizes as text.
        host: the size of the host pool, in blocks or bytes.
        device: the size of the device's KV cache, in the same unit.
        device_bytes: the bytes of the KV cache on one rank.
    """
    if host < SMALL_HOST * device and setup.config.store_policy == "eager":
        whole = size_text(device_bytes * setup.copies)
        return warn(
            f"{ratio}: the host holds little that the device does not hold too",
            f"raise host_bytes to at least three times the device's {whole}, or set store_policy to "
            f"{small_host_policy(setup.config)}",
        )
    return ok(f"{ratio}, {host / device:.1f} times as many")


def _longest_prefix(setup: Setup) -> Finding | None:
    """Compare the host with the longest prompt, which takes at most all blocks of the device."""
    block, device, config = setup.sizes.block_bytes, setup.sizes.device_blocks, setup.config
    if not (block and device and config.has_tiers):
        return None
    slots = config.host_bytes // setup.copies // block
    if not slots:
        return None  # "host pool" has reported this, or `host_bytes` is not known.
    if slots >= device:
        return ok(
            "any prompt that fits the device fits host memory, through which blocks of lower tiers pass"
        )
    return warn(
        f"a prompt with more than {slots:,} blocks does not fit host memory, through which blocks of lower tiers pass: it "
        f"comes back in parts; with several KV cache groups, or if the engine fails requests whose load fails, only its "
        f"first {slots:,} blocks do",
        f"raise host_bytes above the longest prompt's KV, with {size_text(block * setup.copies)} for each block",
    )


def _copy_speed(setup: Setup) -> Finding:
    # Each page is copied separately, so every page has the same weight in the median.
    pages = setup.sizes.page_bytes
    page = sorted(pages)[len(pages) // 2]
    share = next((share for size, share in SPEEDS if page >= size), None)
    reach = f"about {share} of" if share is not None else "less than 0.5 of"
    text = f"pages of {size_text(page)}: scattered blocks are copied at {reach} one large copy's speed (measured on a host)"
    if page >= _GOOD_PAGE:
        return ok(text)
    return warn(
        text, "larger blocks (the engine's block size), or layout 'blocks', where a block is one piece"
    )


def _gpu(_: Setup) -> Finding:
    gpus = find_gpus()
    if not gpus.names:
        return ok("no NVIDIA GPU is visible here: copies are between two places in host memory")
    counted = ", ".join(f"{gpus.names.count(name)} {name}" for name in dict.fromkeys(gpus.names))
    text = f"{counted}; a driver for CUDA {gpus.cuda // 1000}.{gpus.cuda % 1000 // 10}"
    if not gpus.can_register:
        return fail(
            f"{text}: its driver registers no host memory, as under confidential computing, so nothing could be cached",
            "run without confidential computing, or without kvoffload",
        )
    if gpus.cuda < _BATCHED:
        return warn(
            f"{text}: every block will need its own call of the driver",
            "install a driver for CUDA 12.8 or newer",
        )
    return ok(text)


def _memory_node(_: Setup) -> Finding | None:
    gpus = find_gpus()
    nodes = {gpu: preferred_node(gpu, read_file) for gpu in gpus.addresses}
    if not any(nodes.values()):
        return None
    far = [gpu for gpu, node in nodes.items() if node is not None and not node.allowed_processors()]
    if far:
        return warn(
            f"this process may use no processor on the NUMA node of {', '.join(far)}: copies would cross the sockets",
            "give the engine processors of its GPU's node (cpuset, numactl, Kubernetes' topology manager)",
        )
    return ok("this process may use processors on each GPU's NUMA node")


HOST_MEMORY = Check("host memory", _host_memory)
SIZED = (
    HOST_MEMORY,
    Check("locked memory", _locked_memory),
    Check("host pool", _host_pool),
)
"""The checks that need `host_bytes`."""
HOST_PATH = Check("host path", _host_path)
"""This check needs `host_bytes` too, if `host_path` is set."""
LONGEST_PREFIX = Check("longest prefix", _longest_prefix)
CHECKS = (
    *SIZED,
    HOST_PATH,
    Check("kept memory", _kept_memory),
    LONGEST_PREFIX,
    Check("swap", _swap),
    Check("huge pages", _huge_pages),
)
COPY_SPEED = Check("copy speed", _copy_speed)
"""Run this check only if the setup's page sizes are known."""
GPUS = (Check("gpu", _gpu), Check("memory node", _memory_node))
"""These checks call the driver, so they do not run at an engine's start."""
