"""Asynchronous scheduling on a CPU, where the environment asks for it.

vLLM's CPU platform always switches it off, since nothing is gained by it there. A test of what a plugin does while two
steps are in flight wants it on; the scheduler, the batch queue and the runner are the same code as on a GPU.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SWITCH = (
    "VLLM_CPU_OPS_ASYNC_SCHEDULING"  # "1": two steps in flight; looked at whenever an engine is configured.
)


def follow_the_switch() -> None:
    """Makes the CPU platform leave asynchronous scheduling on for as long as the switch is set."""
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.check_and_update_config.__func__

    def update_and_overlap(cls: type[CpuPlatform], config: VllmConfig) -> None:
        stock(cls, config)
        if os.environ.get(SWITCH) == "1":
            config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(update_and_overlap)
