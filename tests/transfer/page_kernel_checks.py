"""Checks of the page kernel, for a process in which Triton is there: `python -m tests.transfer.page_kernel_checks interpret`.

`interpret` runs the kernel on host memory by Triton's interpreter, `compile` compiles it for a device that need not be there.
"""

from __future__ import annotations

import re
import sys

import numpy as np
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from kvoffload.transfer import page_kernel
from kvoffload.transfer.runs import CopyRuns

PLACE = 5 * 1024  # bytes between the beginnings of two runs: more than any of them
DIRTY = 0xA5

SIZES = st.one_of(
    st.integers(1, 40), st.integers(1, PLACE - 64), st.sampled_from([16, 512, 1024, 4096, 4096 + 16, 4111])
)
SHIFTS = st.one_of(st.just(0), st.just(0), st.integers(0, 31))


@seed(0)
@settings(max_examples=10, deadline=None, database=None)
@given(runs=st.lists(st.tuples(SIZES, SHIFTS, SHIFTS), max_size=70), order=st.randoms(use_true_random=False))
def copies_every_byte_and_no_other(runs: list[tuple[int, int, int]], order: object) -> None:
    """Any sizes, either end aligned or not, scattered; what lies between them stays."""
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
    page_kernel.launch(torch.from_numpy(page_kernel.describe(copy_runs)))
    assert np.array_equal(target, wanted)


def words_are_16_bytes_and_what_is_not_aligned_goes_byte_by_byte() -> None:
    """An access of 16 bytes to any other address is a fault of the device, and ends the engine."""
    from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found]
    from triton.compiler import ASTSource, compile  # type: ignore[import-not-found]

    kernel = page_kernel._copy_runs
    signature = {"descriptors": "*i64", "runs": "i32", "words": "constexpr"}
    constants = {"words": page_kernel._WORDS}
    source = ASTSource(kernel, signature, constexprs=constants, attrs={(0,): [["tt.divisibility", 16]]})
    made = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": page_kernel._WARPS})
    found = re.findall(r"(@%p\d+ )?(ld|st)\.global\.(\S+)", made.asm["ptx"])
    assert {(way, width) for guard, way, width in found if guard} == {
        (way, width) for way in ("ld", "st") for width in ("v2.b64", "b8")
    }
    assert {(way, width) for guard, way, width in found if not guard} == {("ld", "b64")}  # the descriptors
    assert made.asm["cubin"]


if __name__ == "__main__":
    if sys.argv[1] == "interpret":
        copies_every_byte_and_no_other()
    else:
        words_are_16_bytes_and_what_is_not_aligned_goes_byte_by_byte()
