"""Machines of files: a root folder in which the kernel's files are written, and devices and packages as wished."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvoffload.checks.check import Answer, Check, Setup, run_checks
from kvoffload.checks.gpus import Gpu, Gpus
from kvoffload.checks.machine import Machine, Space, reader
from kvoffload.model.config import OffloadConfig

GIB = 2**30

ROOMY = {
    "proc/meminfo": "MemTotal: 104857600 kB\nMemAvailable: 104857600 kB\n",  # 100 GiB
    "proc/self/cgroup": "0::/engine\n",
    "sys/fs/cgroup/engine/memory.max": "max\n",
    "sys/fs/cgroup/engine/memory.current": "1000\n",
    "proc/self/limits": "Limit  Soft Limit  Hard Limit  Units\nMax locked memory  unlimited  unlimited  bytes\n",
    "proc/swaps": "Filename Type Size Used Priority\n",
    "sys/devices/system/node/online": "0\n",
}
H200 = Gpus((Gpu("H200", "0000:1b:00.0"),), "570.1", 12080)


def machine(root: Path, files: Mapping[str, str | None] | None = None, **given: object) -> Machine:
    """Return a roomy machine, changed by `files`: None takes one away."""
    for name, text in {**ROOMY, **(files or {})}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            path.unlink(missing_ok=True)
        else:
            path.write_text(text)
    settings: dict[str, Any] = {
        "read": reader(root),
        "exists": lambda path: (root / path.lstrip("/")).exists(),
        "space": lambda path: Space(GIB, GIB),
        "gpus": Gpus,
        "requirements": lambda: ("torch>=2.5", 'opentelemetry-api>=1.27; extra == "otel"'),
        "version": {"kvoffload": "0.1.0", "torch": "2.13.0+cpu"}.get,
        "entry_points": lambda group: {},
        "source": lambda package, path: None,
        "environ": {},
        "python": (3, 11, 7),
    }
    return Machine(**{**settings, **given})


def setup(host_bytes: int = 8 * GIB, **known: object) -> Setup:
    values: dict[str, Any] = {"config": OffloadConfig(host_bytes=host_bytes), **known}
    return Setup(**values)


def ask(check: Check, known: Setup, where: Machine) -> tuple[str, str]:
    """Return verdict and text; what is not go must have a remedy, but for what is not known."""
    (answer,) = run_checks([check], known, where)
    finding = answer.finding
    assert answer == Answer(check.name, finding)
    assert bool(finding.remedy) or finding.verdict in ("go", "not known"), finding
    return str(finding.verdict), finding.text
