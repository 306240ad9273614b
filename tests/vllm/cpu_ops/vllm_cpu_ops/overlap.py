"""Lets an environment variable enable asynchronous scheduling on a CPU.

vLLM's CPU platform always switches asynchronous scheduling off, because a CPU gains nothing from it. Tests of
plugins with two steps in flight need it. The scheduler, the batch queue and the runner are the same code as
on a GPU.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SWITCH = (
    # With "1", two steps may be in flight. The variable is read whenever an engine is configured.
    "VLLM_CPU_OPS_ASYNC_SCHEDULING"
)


def follow_the_switch() -> None:
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.check_and_update_config.__func__

    def update_and_overlap(cls: type[CpuPlatform], config: VllmConfig) -> None:
        stock(cls, config)
        if os.environ.get(SWITCH) == "1":
            config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(update_and_overlap)
