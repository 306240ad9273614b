"""The provenance of results: version, engine, model, settings, sizes, machine and time.

Journals, traces, reports, JSON output and bench results contain the provenance.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import msgspec

import kvoffload
from kvoffload.model.config import OffloadConfig
from kvoffload.model.engine import EngineIdentity, EngineShape
from kvoffload.telemetry.catalogue import Labels

Provenance = dict[str, object]
"""The provenance's values by name; they are JSON types."""


def describe_run(
    identity: EngineIdentity, shape: EngineShape, config: OffloadConfig, unix_s: float
) -> Provenance:
    """Return the provenance of a run of an engine that began at the time `unix_s`, in unix seconds."""
    return {
        **describe_process(unix_s),
        "engine": msgspec.to_builtins(identity),
        "settings": msgspec.to_builtins(config, enc_hook=str),  # `enc_hook` converts paths
        "ranks": shape.ranks,
        "device_blocks": shape.device_blocks,
        "groups": [f"{group.kind.value}, {group.block_tokens} tokens a block" for group in shape.groups],
    }


def describe_process(unix_s: float) -> Provenance:
    """Return the provenance without an engine: kvoffload's version, the time, the process and the machine."""
    return {
        "kvoffload": kvoffload.__version__,
        "began": datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "pid": os.getpid(),
        **describe_machine(),
    }


def describe_machine() -> Provenance:
    """Return the machine's processor, cores and memory, and Python's version."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
    }


def info_labels(identity: EngineIdentity, config: OffloadConfig, copies: int = 1) -> Labels:
    """Return the label values of `kvoffload_info`, in the catalogue's order.

    Args:
        identity: the engine.
        config: the operator's settings.
        copies: how many copies of a block the host keeps, or how many shards if all ranks have different ones.
    """
    least = "one block" if config.min_load_tokens is None else str(config.min_load_tokens)
    values = kvoffload.__version__, identity.name, identity.version
    return (*values, config.store_policy, config.verify, least, str(copies))


def as_line(provenance: Mapping[str, object]) -> str:
    """Return one line with the versions, the model, the machine and the time from a provenance."""
    engine = provenance.get("engine")
    named = []
    if isinstance(engine, dict):
        named = [f"{engine.get('name')} {engine.get('version')}", f"model {engine.get('model')}"]
    where = f"{provenance.get('host')} ({provenance.get('cpu')}, {provenance.get('cores')} cores)"
    parts = [f"kvoffload {provenance.get('kvoffload')}", *named, where, f"began {provenance.get('began')}"]
    return "; ".join(parts)


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
