"""Memory nodes, GPU and driver, packages, and sizes of pools and pages."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from kvoffload.checks import numa, pools, software
from kvoffload.checks.check import Setup
from kvoffload.checks.gpus import Gpu, Gpus, find_gpus
from kvoffload.checks.machine import Machine, reader
from kvoffload.model.config import OffloadConfig, size_text
from tests.doctor.trees import GIB, H200, ask, machine, setup

(NUMA,) = numa.CHECKS
PYTHON, PACKAGES, GPU = software.CHECKS
HOST_POOL, COPIES = pools.CHECKS

NODES = "sys/devices/system/node"
TWO_NODES: dict[str, str | None] = {
    f"{NODES}/online": "0-1\n",
    f"{NODES}/node0/cpulist": "0-3\n",
    f"{NODES}/node1/cpulist": "4-7\n",
    f"{NODES}/node0/meminfo": f"Node 0 MemTotal: 9 kB\nNode 0 MemFree: {6 * 2**20} kB\n",
    f"{NODES}/node1/meminfo": f"Node 1 MemFree: {9 * 2**20} kB\n",
    "sys/bus/pci/devices/0000:1b:00.0/numa_node": "1\n",
}


def status(mems: str, cpus: str) -> dict[str, str | None]:
    return {"proc/self/status": f"Name:\tpython\nCpus_allowed_list:\t{cpus}\nMems_allowed_list:\t{mems}\n"}


@pytest.mark.parametrize(
    ("files", "verdict", "text"),
    [
        ({}, "go", "one memory node"),
        ({f"{NODES}/online": None}, "not known", "the kernel does not list them"),
        ({f"{NODES}/online": "\n"}, "not known", "does not list"),
        ({f"{NODES}/online": "0-99999999999"}, "not known", "does not list"),
        ({**TWO_NODES, **status("0-1", "0-7")}, "warning", "may run on nodes 0, 1"),
        (TWO_NODES, "warning", "may run on nodes 0, 1"),
        ({**TWO_NODES, **status("1", "4-7")}, "go", "bound to node 1"),
        ({**TWO_NODES, **status("0-1", "4-5")}, "go", "bound to node 1"),
        (
            {**TWO_NODES, **status("0", "0-3")},
            "warning",
            "GPUs are on node 1, but this process may use memory of node 0",
        ),
    ],
)
def test_memory_nodes(tmp_path: Path, files: dict[str, str | None], verdict: str, text: str) -> None:
    found = ask(NUMA, setup(), machine(tmp_path, files, gpus=lambda: H200))
    assert found[0] == verdict
    assert text in found[1]


def test_a_node_that_has_less_than_one_rank_wants(tmp_path: Path) -> None:
    where = machine(tmp_path, {**TWO_NODES, **status("0", "0-3")})
    verdict, text = ask(NUMA, setup(8 * GIB, ranks=1), where)
    assert verdict == "warning"
    assert "6.0 GiB free of the 8.0 GiB wanted" in text
    assert ask(NUMA, setup(5 * GIB, ranks=1), where)[0] == "go"
    assert ask(NUMA, setup(8 * GIB, ranks=2), where)[0] == "go"  # which rank is where is not known


def test_a_firmware_that_does_not_say_where_the_gpu_is(tmp_path: Path) -> None:
    files = {**TWO_NODES, **status("0", "0-3"), "sys/bus/pci/devices/0000:1b:00.0/numa_node": "-1\n"}
    assert ask(NUMA, setup(), machine(tmp_path, files, gpus=lambda: H200))[0] == "go"


VERSIONS = {"kvoffload": "0.1.0", "torch": "2.13.0"}


@pytest.mark.parametrize(
    ("gpus", "versions", "verdict", "text"),
    [
        (H200, VERSIONS, "go", "1 H200; driver 570.1, for CUDA 12.8"),
        (
            Gpus((Gpu("A"), Gpu("B"), Gpu("A")), "1", 13000),
            VERSIONS,
            "go",
            "2 A, 1 B; driver 1, for CUDA 13.0",
        ),
        (Gpus((Gpu("H200"),), "550.2", 12040), VERSIONS, "warning", "for CUDA 12.4: every block"),
        (Gpus((Gpu("H200"),), "550.2"), VERSIONS, "warning", "for CUDA unknown: every block"),
        (Gpus(), VERSIONS, "go", "no GPU is visible here"),
        (replace(H200, can_register=False), VERSIONS, "no-go", "its driver registers no host memory"),
    ],
)
def test_gpu(tmp_path: Path, gpus: Gpus, versions: dict[str, str], verdict: str, text: str) -> None:
    found = ask(GPU, setup(), machine(tmp_path, gpus=lambda: gpus, version=versions.get))
    assert found[0] == verdict
    assert text in found[1]


def test_another_vendors_gpu(tmp_path: Path) -> None:
    assert ask(GPU, setup(), machine(tmp_path, {"dev/kfd": ""}))[0] == "no-go"


@pytest.mark.parametrize("library", ["libnot-there.so.1", "libc.so.6"])
def test_without_the_vendors_library_there_is_no_gpu_and_no_error(library: str) -> None:
    assert find_gpus(library) == Gpus()


NVML = """
#include <string.h>
typedef struct { char legacy[16]; unsigned int numbers[5]; char id[32]; } pci;
int nvmlInit_v2(void) { return INIT; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 2; return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned int size) { strncpy(text, "570.1", size); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 12080; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int number, void **device) { *device = (void *)(0x7f0000000000 + number); return 0; }
int nvmlDeviceGetName(void *device, char *text, unsigned int size) { strncpy(text, "H200", size); return 0; }
int nvmlDeviceGetPciInfo_v3(void *device, pci *info) {
    strcpy(info->legacy, "0000:1B:00.0");
    strcpy(info->id, device == (void *)0x7f0000000001 ? "00000000:AF:00.0" : "00000000:1B:00.0");
    return 0;
}
"""


@pytest.mark.tools("cc")
def test_gpus_are_asked_of_the_vendors_library(tmp_path: Path) -> None:
    for name, outcome in (("good", 0), ("refuses", 9)):
        command = ["cc", "-shared", "-fPIC", f"-DINIT={outcome}", "-x", "c", "-", "-o", str(tmp_path / name)]
        subprocess.run(command, input=NVML, text=True, check=True)
    two = (Gpu("H200", "0000:1b:00.0"), Gpu("H200", "0000:af:00.0"))
    assert find_gpus(str(tmp_path / "good")) == Gpus(two, "570.1", 12080)
    assert find_gpus(str(tmp_path / "refuses")) == Gpus()


@pytest.mark.gpu
def test_gpus_are_found() -> None:
    found = find_gpus()
    assert found.found
    assert found.driver
    assert found.cuda > 11000


def test_a_choice_of_gpus_is_reported(tmp_path: Path) -> None:
    where = machine(tmp_path, gpus=lambda: H200, version=VERSIONS.get, environ={"CUDA_VISIBLE_DEVICES": "1"})
    assert "CUDA_VISIBLE_DEVICES=1 is not applied here" in ask(GPU, setup(), where)[1]


def test_packages(tmp_path: Path) -> None:
    assert ask(PACKAGES, setup(), machine(tmp_path)) == ("go", "kvoffload 0.1.0, torch 2.13.0+cpu")
    for versions, text in [
        ({}, "torch is not installed"),
        ({"torch": "2.4.1"}, "torch is 2.4.1, below 2.5"),
        ({"torch": "1.13"}, "torch is 1.13, below 2.5"),
    ]:
        assert ask(PACKAGES, setup(), machine(tmp_path, version=versions.get)) == ("no-go", text)


def test_python(tmp_path: Path) -> None:
    assert ask(PYTHON, setup(), machine(tmp_path)) == ("go", "Python 3.11.7")
    assert ask(PYTHON, setup(), machine(tmp_path, python=(3, 10, 1)))[0] == "no-go"


def test_what_kvoffload_requires_is_read_in_earnest(tmp_path: Path) -> None:
    here = Machine()
    assert any(line.startswith("torch>=") for line in here.requirements())
    assert ask(PACKAGES, setup(), here)[0] == "go"
    assert here.version("a-package-that-is-not-there") is None
    assert here.source("kvoffload", "cli/exits.py")
    assert here.source("a_package_that_is_not_there", "x.py") is None


KIB = 1024


@pytest.mark.parametrize(
    ("known", "verdict", "text"),
    [
        (setup(ranks=2, block_bytes=GIB), "not known", "whether the host's 4 blocks are more"),
        (
            setup(ranks=2, block_bytes=GIB, device_blocks=4),
            "warning",
            "4 blocks on the host, 4 on the device: ",
        ),
        (
            setup(ranks=2, block_bytes=GIB, device_blocks=4, config=OffloadConfig(store_policy="lazy")),
            "go",
            "4 blocks on the host, 4 on the device, 1.0 times as many",
        ),
        (setup(ranks=2, block_bytes=GIB, device_blocks=2), "go", "2.0 times as many"),
        (setup(ranks=2, block_bytes=5 * GIB, device_blocks=2), "no-go", "below one block of 5.0 GiB"),
        (setup(ranks=2, page_bytes=(5,), device_blocks=2), "not known", "how many blocks"),
        (setup(block_bytes=GIB, device_blocks=2), "not known", "how many blocks"),
        (Setup(config=None, ranks=1, block_bytes=1, device_blocks=2), "not known", "how many blocks"),
        (
            Setup(config=OffloadConfig(host_bytes_per_rank=9), block_bytes=3, device_blocks=1),
            "go",
            "3 blocks on the host",
        ),
    ],
)
def test_host_pool(tmp_path: Path, known: Setup, verdict: str, text: str) -> None:
    found = ask(HOST_POOL, known, machine(tmp_path))
    assert found[0] == verdict
    assert text in found[1]


@pytest.mark.parametrize(
    ("pages", "verdict", "text"),
    [
        ((), "not known", "the bytes of one block in one layer"),
        ((2048 * KIB,), "go", "about 0.85 of"),
        ((64 * KIB,) * 8, "go", "pages of 64.0 KiB: scattered blocks are copied at about 0.8 of"),
        ((64 * KIB - 1,), "warning", "about 0.5 of"),
        ((4 * KIB,), "warning", "about 0.5 of"),
        ((4 * KIB - 1,), "warning", "less than 0.5 of"),
        ((4 * KIB, 4 * KIB, 2048 * KIB), "warning", "pages of 4.0 KiB"),
    ],
)
def test_copy_speed(tmp_path: Path, pages: tuple[int, ...], verdict: str, text: str) -> None:
    found = ask(COPIES, setup(page_bytes=pages), machine(tmp_path))
    assert found[0] == verdict
    assert text in found[1]


def test_speeds_are_those_that_were_measured() -> None:
    text = (Path(__file__).resolve().parents[2] / "kvoffload/bench/README.md").read_text(encoding="utf-8")
    ascending = sorted(pools.SPEEDS)
    assert ", ".join(f"{share} at {size_text(size).replace('.0', '')}" for size, share in ascending) in text


def test_a_reader_reads_below_its_root_and_never_for_ever(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xff ok")
    read = reader(tmp_path)
    assert read("/a") == "\ufffd ok"
    assert read("/nowhere") is None
    assert len(reader(Path("/"))("/dev/zero") or "") == 1 << 20
