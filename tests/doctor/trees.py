"""Machines of files: a root folder in which the kernel's files are written, and devices and packages as wished."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvoffload.checks.check import Check, Setup, Sizes, run_checks
from kvoffload.checks.machine import Gpus, Machine, reader
from kvoffload.model.config import OffloadConfig

GIB = 2**30

ROOMY = {
    "proc/meminfo": "MemTotal: 104857600 kB\nMemAvailable: 104857600 kB\n",  # 100 GiB
    "proc/self/cgroup": "0::/engine\n",
    "sys/fs/cgroup/engine/memory.max": "max\n",
    "sys/fs/cgroup/engine/memory.current": "1000\n",
    "proc/swaps": "Filename Type Size Used Priority\n",
}


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
        "lockable": lambda: -1,
        "free": lambda folder: GIB,
        "gpus": Gpus,
        "version": {}.get,
        "entry_points": lambda group: {},
        "environ": {},
    }
    return Machine(**{**settings, **given})


def setup(*, pins: bool = False, sizes: Sizes | None = None, **settings: object) -> Setup:
    """Return a setup of these settings."""
    return Setup(OffloadConfig(**settings), sizes or Sizes(), pins)  # type: ignore[arg-type]


def ask(checks: tuple[Check, ...], name: str, known: Setup, where: Machine) -> tuple[str, str]:
    """Return verdict and text of one check; a problem must have a remedy."""
    (finding,) = run_checks([one for one in checks if one.name == name], known, where)
    assert bool(finding.remedy) or finding.verdict in ("go", "not known"), finding
    return str(finding.verdict), finding.text
