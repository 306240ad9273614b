"""Enables asynchronous scheduling on a CPU, by an environment variable.

vLLM's CPU platform always switches asynchronous scheduling off, because it gains nothing on a CPU. Tests of
plugins with two steps in flight need it. The scheduler, the batch queue and the runner are the same code as
on a GPU.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SWITCH = (
    "VLLM_CPU_OPS_ASYNC_SCHEDULING"  # "1" allows two steps in flight; read whenever an engine is configured
)


def follow_the_switch() -> None:
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.check_and_update_config.__func__

    def update_and_overlap(cls: type[CpuPlatform], config: VllmConfig) -> None:
        stock(cls, config)
        if os.environ.get(SWITCH) == "1":
            config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(update_and_overlap)
