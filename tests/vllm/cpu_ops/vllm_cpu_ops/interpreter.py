"""Makes Triton's interpreter, which runs the V2 runner's kernels on a CPU, behave like compiled kernels."""

from __future__ import annotations

import dataclasses
import os
from typing import Any


def match_the_compiler() -> None:
    """Switch off checks that compiled kernels do not make, and accept all masks that they accept.

    Without the interpreter, do nothing.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime.interpreter import InterpreterBuilder, interpreter_builder  # type: ignore[import-not-found]

    # Compiled kernels check integer overflow only in debug mode. In the interpreter, the checks take 40 % of
    # an engine's step.
    options = dataclasses.replace(interpreter_builder.options, sanitize_overflow=False)
    interpreter_builder.options = options

    store = InterpreterBuilder.create_masked_store

    def store_where_true(self: InterpreterBuilder, pointers: Any, value: Any, mask: Any, *more: Any) -> Any:
        # the kernel that applies a grammar has a mask of integers
        mask.data = mask.data.astype(bool)
        return store(self, pointers, value, mask, *more)

    InterpreterBuilder.create_masked_store = store_where_true
