"""Triton's interpreter, in which the V2 runner's kernels run on a CPU, brought nearer to what Triton compiles."""

from __future__ import annotations

import dataclasses
import os
from typing import Any


def match_the_compiler() -> None:
    """Drops checks that a compiled kernel lacks, and takes masks that it takes. Nothing where Triton does not interpret."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime.interpreter import InterpreterBuilder, interpreter_builder  # type: ignore[import-not-found]

    # Compiled, integer overflow is checked in debug mode only; interpreted, that is 40 % of an engine's step.
    options = dataclasses.replace(interpreter_builder.options, sanitize_overflow=False)
    interpreter_builder.options = options

    store = InterpreterBuilder.create_masked_store

    def store_where_true(self: InterpreterBuilder, pointers: Any, value: Any, mask: Any, *more: Any) -> Any:
        # The kernel that applies a grammar has a mask of integers.
        mask.data = mask.data.astype(bool)
        return store(self, pointers, value, mask, *more)

    InterpreterBuilder.create_masked_store = store_where_true
