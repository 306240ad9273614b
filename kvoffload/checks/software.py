"""The GPU, its driver, and the packages of this environment."""

from __future__ import annotations

import re

from kvoffload.checks.check import Check, Finding, Setup, go, no_go, warn
from kvoffload.checks.gpus import Gpus
from kvoffload.checks.machine import Machine

_BATCHED = 12080  # from this CUDA on, one call of the driver copies many blocks
_AMD = "/dev/kfd"


def version_numbers(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, to compare them: "0.32.0+cpu" gives 0, 32, 0."""
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part[:9]) for part in found[0].split(".")) if found else ()


def entry_point_problem(machine: Machine, group: str, name: str, value: str) -> str:
    """Return what is wrong with the entry point of an engine's plugin; empty if nothing is."""
    found = machine.entry_points(group).get(name)
    if found == value:
        return ""
    what = "is not registered" if found is None else f"is {found}, not {value},"
    return f"the entry point {name!r} of {group} {what} in this environment"


def _python(_: Setup, machine: Machine) -> Finding:
    running = ".".join(map(str, machine.python))
    if machine.python < (3, 11):
        return no_go(f"Python {running} runs here", "use Python 3.11 or newer")
    return go(f"Python {running}")


def _packages(_setup: Setup, machine: Machine) -> Finding:
    found, wrong = [f"kvoffload {machine.version('kvoffload')}"], []
    for requirement in machine.requirements():
        name, _, bound = requirement.partition(";")[0].strip().partition(">=")
        if "extra ==" in requirement:
            continue
        version = machine.version(name)
        if version is None:
            wrong.append(f"{name} is not installed")
        elif version_numbers(version) < version_numbers(bound):
            wrong.append(f"{name} is {version}, below {bound}")
        elif name == "torch":
            found.append(f"torch {version}")
    if wrong:
        return no_go("; ".join(wrong), "pip install --upgrade kvoffload")
    return go(", ".join(found))


def _gpu(setup: Setup, machine: Machine) -> Finding:
    gpus = machine.gpus()
    if gpus.found:
        return _nvidia(gpus, machine)
    if machine.exists(_AMD):
        return no_go("the GPU is AMD's, which kvoffload does not support", "use an NVIDIA GPU, or the CPU")
    return go("no GPU is visible here: copies are between two places in host memory")


def _nvidia(gpus: Gpus, machine: Machine) -> Finding:
    names = [gpu.name for gpu in gpus.found]
    counted = ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))
    newest = f"{gpus.cuda // 1000}.{gpus.cuda % 1000 // 10}" if gpus.cuda else "unknown"
    text = f"{counted}; driver {gpus.driver}, for CUDA {newest}"
    if (chosen := machine.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        text += f"; CUDA_VISIBLE_DEVICES={chosen} is not applied here"
    if not gpus.can_register:
        refused = (
            "its driver registers no host memory, as under confidential computing, so nothing could be cached"
        )
        return no_go(f"{text}: {refused}", "run without confidential computing, or without kvoffload")
    if gpus.cuda < _BATCHED:
        slower = "every block will need its own call of the driver"
        return warn(f"{text}: {slower}", "a driver for CUDA 12.8 or newer")
    return go(text)


CHECKS = (Check("python", _python), Check("packages", _packages), Check("gpu", _gpu))
