"""The types of checks: a check, its input (`Setup`), and its finding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from kvoffload.model.config import OffloadConfig


class Verdict(StrEnum):
    """The result of a check, from best to worst."""

    OK = "ok"
    UNKNOWN = "unknown"  # the check cannot be made on this machine, or needs a value that was not given
    WARNING = "warning"  # the engine starts, but offloading costs more or saves less than it could
    ERROR = "error"  # the engine would not start, its requests would fail, or offloading would be useless


GIVE = "give the engine's own command line: kvoffload doctor -- vllm serve MODEL ..."
"""The remedy when a check needs the engine's command line and the doctor was started without one."""
FAILING = frozenset([Verdict.WARNING, Verdict.ERROR])


@dataclass(frozen=True, slots=True)
class Sizes:
    """An engine's sizes. A size is None or empty if it is not known before the engine starts.

    Args:
        ranks: how many workers of the engine run on this machine.
        block_bytes: bytes of one block on one rank, in all tensors together.
        page_bytes: bytes of one block on one rank, in each tensor of the KV cache.
        device_blocks: the number of blocks in the device's KV cache.
        engines: how many engines of these sizes run on this machine.
        device_bytes: bytes of the KV cache on one rank, if they are known without the size of a block.
        sharers: how many ranks have the same bytes in their blocks and may share one copy.
    """

    ranks: int = 1
    block_bytes: int | None = None
    page_bytes: tuple[int, ...] = ()
    device_blocks: int | None = None
    engines: int = 1
    device_bytes: int | None = None
    sharers: int = 1


@dataclass(frozen=True, slots=True)
class Setup:
    """The input of a check: everything known about an engine before its start.

    Args:
        config: the operator's settings.
        sizes: the engine's sizes.
        pins: whether the engine pins its host memory, which it does for a CUDA device.
    """

    config: OffloadConfig
    sizes: Sizes = Sizes()
    pins: bool = False

    @property
    def copies(self) -> int:
        """Return how many copies of a block an engine keeps on the host of this machine."""
        return self.sizes.ranks // self.sizes.sharers if self.config.host_share else self.sizes.ranks


@dataclass(frozen=True, slots=True)
class Finding:
    """The finding of one check.

    Args:
        verdict: the result.
        text: the reason, in a sentence.
        remedy: how to solve the problem; empty if there is no problem.
        check: the check's name; `run_checks` sets it.
    """

    verdict: Verdict
    text: str
    remedy: str = ""
    check: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """A named function that checks one thing before an engine starts.

    Args:
        name: the name in the doctor's output. Never change it, because scripts and log queries rely on it.
        find: returns the finding, or None if the check is about a feature that is off. If it raises an exception, the
            finding is a warning.
    """

    name: str
    find: Callable[[Setup], Finding | None]


@dataclass(frozen=True, slots=True)
class Given:
    """The values that an adapter read from the engine's command line.

    Args:
        settings: kvoffload's settings in the engine's configuration; None if it contains none.
        sizes: the engine's sizes.
        checks: the adapter's checks.
        parse: parses the settings, or raises `ConfigError`. None unless the engine has its own host tier and uses only
            kvoffload's lower tiers.
        unread: the reason why the engine's configuration, and with it the settings, could not be read; None if it was
            read or not given.
    """

    settings: Mapping[str, object] | None
    sizes: Sizes
    checks: tuple[Check, ...]
    parse: Callable[[Mapping[str, object]], OffloadConfig] | None = None
    unread: Finding | None = None


def run_checks(checks: Iterable[Check], setup: Setup) -> list[Finding]:
    """Run all checks that apply, and return their findings. If a check raises, its finding is a warning."""
    found = ((check.name, _find(check, setup)) for check in checks)
    return [replace(finding, check=name) for name, finding in found if finding is not None]


def ok(text: str) -> Finding:
    """Return a finding that says the check passed."""
    return Finding(Verdict.OK, text)


def warn(text: str, remedy: str) -> Finding:
    """Return a finding for a problem that does not keep the engine from running."""
    return Finding(Verdict.WARNING, text, remedy)


def fail(text: str, remedy: str) -> Finding:
    """Return a finding for a problem that must be solved before the engine starts."""
    return Finding(Verdict.ERROR, text, remedy)


def unknown(text: str, remedy: str = "") -> Finding:
    """Return a finding for a check that lacks an input. `remedy` says how to give the input."""
    return Finding(Verdict.UNKNOWN, text, remedy)


def _find(check: Check, setup: Setup) -> Finding | None:
    try:
        return check.find(setup)
    except Exception as error:  # an error in a check must not stop an engine
        return warn(f"the check itself failed: {error!r}", "report it; the others are not affected")
