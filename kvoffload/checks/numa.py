"""NUMA placement: memory is on the node of the thread that touches it first, unless another node is requested."""

from __future__ import annotations

from collections.abc import Iterator

from kvoffload.checks.check import Check, Finding, Setup, go, not_known, warn
from kvoffload.checks.machine import Machine
from kvoffload.checks.memory import needed_bytes
from kvoffload.model.config import size_text

_NODES = "/sys/devices/system/node"
_BIND = (
    "bind each rank to its GPU's node: numactl --cpunodebind=N --membind=N, or the engine's own option for it"
)
_LONGEST = 4096  # numbers in a list of the kernel's


def _numa(setup: Setup, machine: Machine) -> Finding:
    nodes = _numbers(machine.read(f"{_NODES}/online"))
    if nodes is None:
        return not_known(f"the memory nodes: the kernel does not list them ({_NODES})")
    if len(nodes) == 1:
        return go("the machine has one memory node")
    usable = (_status(machine, "Mems_allowed_list") or nodes) & nodes
    gpus = {node for gpu in machine.gpus().found if (node := _node_of(machine, gpu.pci)) is not None}
    if gpus - usable:
        return warn(
            f"GPUs are on node {_listed(gpus - usable)}, but this process may use memory of node {_listed(usable)} only: "
            "every copy crosses between nodes",
            _BIND,
        )
    cpus = _status(machine, "Cpus_allowed_list")
    runs_on = {node for node in nodes if cpus is None or cpus & (_cpus_of(machine, node) or frozenset())}
    if len(runs_on) > 1 and len(usable) > 1:
        return warn(
            f"this process may run on nodes {_listed(runs_on)}: a GPU's host memory is requested on its own node, but if "
            "the kernel refuses that (log host_memory_node), it lies where it is touched first, and copies are slower",
            _BIND,
        )
    return _compare_free(setup, machine, usable if len(usable) == 1 else runs_on)


def _compare_free(setup: Setup, machine: Machine, nodes: set[int] | frozenset[int]) -> Finding:
    bound = f"this process is bound to node {_listed(nodes)}"
    free = [count for node in nodes if (count := _free_bytes(machine, node)) is not None]
    needed = needed_bytes(setup)
    if free and needed is not None and setup.ranks == 1 and needed[0] > sum(free):
        return warn(
            f"{bound}, which has {size_text(sum(free))} free of the {size_text(needed[0])} wanted: the rest comes from its "
            "page cache or from other nodes",
            "lower host_bytes to what one node has",
        )
    return go(bound)


def _node_of(machine: Machine, pci: str) -> int | None:
    text = (machine.read(f"/sys/bus/pci/devices/{pci}/numa_node") or "").strip() if pci else ""
    return int(text) if text.isdecimal() else None  # -1: the firmware does not report a node


def _cpus_of(machine: Machine, node: int) -> frozenset[int] | None:
    return _numbers(machine.read(f"{_NODES}/node{node}/cpulist"))


def _free_bytes(machine: Machine, node: int) -> int | None:
    for line in (machine.read(f"{_NODES}/node{node}/meminfo") or "").splitlines():
        words = line.split()
        if "MemFree:" in words and words[-2].isdecimal():
            return int(words[-2]) * 1024
    return None


def _status(machine: Machine, name: str) -> frozenset[int] | None:
    for line in (machine.read("/proc/self/status") or "").splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return _numbers(value)
    return None


def _numbers(text: str | None) -> frozenset[int] | None:
    """Return the numbers of a list such as "0-3,8", None if it is not one."""
    try:
        return (
            frozenset(number for part in (text or "").strip().split(",") for number in _range(part)) or None
        )
    except ValueError:
        return None


def _range(part: str) -> Iterator[int]:
    first, dash, last = part.partition("-")
    low, high = int(first), int(last if dash else first)
    if high - low > _LONGEST:
        raise ValueError
    yield from range(low, high + 1)


def _listed(nodes: set[int] | frozenset[int]) -> str:
    return ", ".join(map(str, sorted(nodes)))


CHECKS = (Check("memory nodes", _numa),)
