"""Simulated machines: a root folder with the kernel's files, and chosen devices and packages."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from kvoffload.checks.check import Check, Setup, Sizes, run_checks
from kvoffload.checks.gpus import Gpus
from kvoffload.transfer.host_memory import read_file
from tests.settings import make_config

GIB = 2**30
ENVIRONMENT = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "VLLM_PLUGINS"}
NAMES = {
    "getrlimit": "resource.getrlimit",
    "disk_usage": "shutil.disk_usage",
    "gpus": "kvoffload.checks.memory.find_gpus",
    "version": "importlib.metadata.version",
    "entry_points": "importlib.metadata.entry_points",
}
FAKES = {"getrlimit": lambda _: (-1, -1), "disk_usage": lambda _: SimpleNamespace(free=GIB), "gpus": Gpus}

ROOMY = {
    "proc/meminfo": "MemTotal: 104857600 kB\nMemAvailable: 104857600 kB\n",
    "proc/self/cgroup": "0::/engine\n",
    "sys/fs/cgroup/engine/memory.max": "max\n",
    "sys/fs/cgroup/engine/memory.current": "1000\n",
    "proc/swaps": "Filename Type Size Used Priority\n",
}


DENSE: dict[str, Any] = {
    "torch_dtype": "bfloat16",
    "vocab_size": 512,
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
"""The sizes of a small model, as in its `config.json`."""


class Machine:
    """A simulated machine. Inside its `with` block, the doctor's checks read this machine's files."""

    def __init__(self, root: Path, environ: Mapping[str, str], **given: object) -> None:
        self.environ = environ
        self.patched: dict[str, Any] = {"kvoffload.checks.memory.read_file": partial(_read, root), **given}
        self.patched["kvoffload.checks.outputs.read_file"] = partial(_read, root)
        self._stack = ExitStack()

    def __enter__(self) -> None:
        self._stack.enter_context(patch.dict(os.environ, self.environ))
        for name in ENVIRONMENT - self.environ.keys():
            os.environ.pop(name, None)
        for name, fake in self.patched.items():
            self._stack.enter_context(patch(name, fake))

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def machine(
    root: Path, files: Mapping[str, str | None] | None = None, environ: Mapping[str, str] | None = None,
    **given: object,
) -> Machine:  # fmt: skip
    """Return a machine with enough memory. `files` replaces kernel files by path; the value None removes a
    file.
    """
    for name, text in {**ROOMY, **(files or {})}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            path.unlink(missing_ok=True)
        else:
            path.write_text(text)
    return Machine(root, environ or {}, **{NAMES[name]: fake for name, fake in {**FAKES, **given}.items()})


def _read(root: Path, path: str) -> str | None:
    return read_file(str(root / path.lstrip("/")))


def setup(*, pins: bool = False, sizes: Sizes | None = None, **settings: object) -> Setup:
    return Setup(make_config(**settings), sizes or Sizes(), pins)


def ask(checks: tuple[Check, ...], name: str, known: Setup, where: Machine) -> tuple[str, str]:
    """Run one check; return its verdict and text. Fail if a problem has no remedy."""
    with where:
        (finding,) = run_checks([one for one in checks if one.name == name], known)
    assert bool(finding.remedy) or finding.verdict in ("ok", "unknown"), finding
    return str(finding.verdict), finding.text
