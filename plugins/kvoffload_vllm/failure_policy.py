"""The policy by which vLLM acts when a load fails."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def find_failure_policy(vllm_config: VllmConfig) -> str:
    """Return `kv_load_failure_policy` as vLLM's scheduler reads it. To be called while a worker's connector is made.

    The scheduler goes by the outermost connector's configuration. A MultiConnector makes its children with copies of
    vLLM's configuration in which the child's `kv_transfer_config` has replaced the outer one. Where vLLM makes a worker it
    sets the configuration that the whole process runs by; in the scheduler's process nothing leads a child to it.
    """
    from vllm.config.vllm import get_current_vllm_config_or_none

    outermost = get_current_vllm_config_or_none() or vllm_config
    return str(outermost.kv_transfer_config.kv_load_failure_policy)
