"""Checks the page kernel, in a process with Triton: `python -m tests.transfer.page_kernel_checks interpret`.

`interpret` runs the kernel on host memory in Triton's interpreter. `compile` compiles the kernel, which needs
no device.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import triton  # type: ignore[import-not-found]
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found]
from triton.compiler import ASTSource, CompiledKernel, compile  # type: ignore[import-not-found]

from kvoffload.gpu_check.hazards import PTX
from kvoffload.transfer.cuda import page_kernel
from kvoffload.transfer.runs import CopyRuns

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
PLACE = 5 * 1024  # the distance in bytes between the starts of two runs; every run is shorter
DIRTY = 0xA5
PROGRAMS = 32
ARCHITECTURES = (75, 80, 86, 89, 90, 100, 103, 120)
"""Compute capabilities from Turing to Blackwell, multiplied by ten."""

SIZES = st.integers(1, 40) | st.integers(1, PLACE - 64) | st.sampled_from([16, 512, 1024, 4096, 4112, 4111])
SHIFTS = st.one_of(st.just(0), st.just(0), st.integers(0, 31))


@seed(0)
@settings(max_examples=10, deadline=None, database=None)
@given(runs=st.lists(st.tuples(SIZES, SHIFTS, SHIFTS), max_size=70), order=st.randoms(use_true_random=False))
def copies_every_byte_and_no_other(runs: list[tuple[int, int, int]], order: object) -> None:
    """Copy scattered runs of any size and alignment; check that the bytes between the runs stay unchanged."""
    room = (len(runs) + 1) * PLACE
    source = np.random.default_rng(len(runs)).integers(0, 256, room, np.uint8)
    target, wanted = (np.full(room, DIRTY, np.uint8) for _ in range(2))
    places = list(range(len(runs)))
    order.shuffle(places)  # type: ignore[attr-defined]
    rows = []
    for number, (size, source_shift, target_shift) in enumerate(runs):
        begin, end = number * PLACE + source_shift, places[number] * PLACE + target_shift
        wanted[end : end + size] = source[begin : begin + size]
        rows.append((begin, end, size))
    begins, ends, sizes = np.array(rows, np.int64).reshape(-1, 3).T
    copy_runs = CopyRuns(source.ctypes.data + begins, target.ctypes.data + ends, sizes)
    descriptors = torch.from_numpy(np.stack((copy_runs.target, copy_runs.source, copy_runs.size)))
    if runs:
        grid = (min(PROGRAMS, len(runs)),)
        page_kernel._copy_runs[grid](descriptors, len(runs), words=page_kernel._WORDS)
    assert np.array_equal(target, wanted)


def compiles_for(architecture: int) -> None:
    """Check that each copying access has a guard and 16 bytes or one, and that no register is spilled.

    An access of 16 bytes at an unaligned address is a device fault, which ends the engine.
    """
    made = compiled(architecture)
    found = re.findall(r"(@%p\d+ )?(ld|st)\.global\.(\S+)", made.asm["ptx"])
    assert {(way, width) for guard, way, width in found if guard} == {
        (way, width) for way in ("ld", "st") for width in ("v2.b64", "b8")
    }
    # only the descriptors are read without a guard
    assert {(way, width) for guard, way, width in found if not guard} == {("ld", "b64")}
    assert accesses(made) == {"LDG.E.64", "LDG.E.128", "LDG.E.U8", "STG.E.128", "STG.E.U8"}
    assert spilled_bytes(made) == 0


def spills_are_noticed() -> None:
    """Compile the kernel with too few registers; check that the spilled registers are found."""
    starved = compiled(90, maxnreg=24)
    assert spilled_bytes(starved) > 0
    assert {"LDL", "STL"} <= {access.partition(".")[0] for access in accesses(starved)}


def the_pause_assembles_for(architecture: int) -> None:
    """Assemble `gpu-check`'s pause kernel with NVIDIA's assembler, in place of the driver's."""
    name = "ptxas-blackwell" if architecture >= 100 else "ptxas"
    command = [str(TOOLS / name), f"-arch=sm_{architecture}", str(PTX), "-o", "/dev/null"]
    subprocess.run(command, capture_output=True, check=True)


def compiled(architecture: int, **options: int) -> CompiledKernel:
    """Compile the kernel in the same way as its launch does. No device is needed."""
    signature = {"descriptors": "*i64", "runs": "i32", "words": "constexpr"}
    constants = {"words": page_kernel._WORDS}
    aligned = {(0,): [["tt.divisibility", 16]]}
    source = ASTSource(page_kernel._copy_runs, signature, constexprs=constants, attrs=aligned)
    target = GPUTarget("cuda", architecture, 32)
    return compile(source, target=target, options={"num_warps": page_kernel._WARPS, **options})


def accesses(made: CompiledKernel) -> set[str]:
    """Return the kinds of memory access in the device's instructions, including descriptors and spills."""
    found = re.findall(r"\b((?:LD|ST)[GL]?\.[\w.]+|(?:LD|ST)L)\b", _inspected("nvdisasm", "-c", made))
    return {access.removesuffix(".SYS") for access in found}


def spilled_bytes(made: CompiledKernel) -> int:
    """Return the bytes of stack and local memory that a thread needs, as the compiled object reports them."""
    used = dict(re.findall(r"\b(STACK|LOCAL):(\d+)", _inspected("cuobjdump", "-res-usage", made)))
    return int(used["STACK"]) + int(used["LOCAL"])


def _inspected(program: str, option: str, made: CompiledKernel) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as object_file:
        object_file.write(made.asm["cubin"])
        object_file.flush()
        command = [str(TOOLS / program), option, object_file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    if sys.argv[1] == "interpret":
        copies_every_byte_and_no_other()
    else:
        for number in ARCHITECTURES:
            compiles_for(number)
            the_pause_assembles_for(number)
        spills_are_noticed()
