"""What the sizes of host memory and pages mean for the use of offloading."""

from __future__ import annotations

from kvoffload.checks.check import Check, Finding, Setup, go, no_go, not_known, warn
from kvoffload.checks.machine import Machine
from kvoffload.model.config import size_text

SPEEDS = ((2 * 2**20, 0.85), (64 * 2**10, 0.8), (4 * 2**10, 0.5))
"""By page size, the measured speed of scattered host copies relative to one large memcpy (`kvoffload/bench/README.md`)."""

_GOOD_PAGE = 64 * 2**10


def _host_pool(setup: Setup, _: Machine) -> Finding:
    slots = _host_slots(setup)
    if slots is None:
        return not_known(
            "how many blocks the host will hold",
            "give --model, or --block-bytes and --ranks, which the engine reports at its start",
        )
    if slots == 0:
        return no_go(
            f"the host's share of each rank is below one block of {size_text(setup.block_bytes or 0)}",
            "raise host_bytes",
        )
    if setup.device_blocks is None:
        return not_known(
            f"whether the host's {slots:,} blocks are more than the device's",
            "give --device-memory, or --device-blocks, which the engine reports at its start",
        )
    ratio = f"{slots:,} blocks on the host, {setup.device_blocks:,} on the device"
    if slots <= setup.device_blocks and not _is_lazy(setup):
        return warn(
            f"{ratio}: the host holds little that the device does not hold too",
            f"raise host_bytes to several times {_device_size(setup)}, or set store_policy to lazy, which stores only "
            "what the device evicts",
        )
    return go(f"{ratio}, {slots / setup.device_blocks:.1f} times as many")


def _copies(setup: Setup, _: Machine) -> Finding:
    pages = setup.page_bytes
    if not pages:
        return not_known(
            "the bytes of one block in one layer, on which the speed of copies depends",
            "give --model, or --page-bytes, which the engine reports at its start",
        )
    # A block needs one copy per page, so the size of most pages counts, not of most bytes.
    page = sorted(pages)[len(pages) // 2]
    share = next((share for size, share in SPEEDS if page >= size), None)
    reach = f"about {share} of" if share is not None else "less than 0.5 of"
    text = f"pages of {size_text(page)}: scattered blocks are copied at {reach} one large copy's speed (measured on a host)"
    if page >= _GOOD_PAGE:
        return go(text)
    larger = "larger blocks (the engine's block size)"
    return warn(
        text, larger if len(pages) == 1 else f"{larger}, or layout 'blocks', where a block is one piece"
    )


def _host_slots(setup: Setup) -> int | None:
    block = setup.block_bytes
    config = setup.config
    if config is None or not block or (setup.ranks is None and config.host_bytes_per_rank is None):
        return None
    return config.bytes_per_rank(setup.ranks or 1) // block


def _is_lazy(setup: Setup) -> bool:
    return setup.config is not None and setup.config.store_policy == "lazy"


def _device_size(setup: Setup) -> str:
    return f"the device's {size_text((setup.block_bytes or 0) * (setup.device_blocks or 0) * (setup.ranks or 1))}"


HOST_POOL, COPY_SPEED = Check("host pool", _host_pool), Check("copy speed", _copies)
CHECKS = (HOST_POOL, COPY_SPEED)
