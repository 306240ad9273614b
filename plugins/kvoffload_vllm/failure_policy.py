"""What vLLM does with a request whose load fails."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def find_failure_policy(vllm_config: VllmConfig) -> str:
    """Return `kv_load_failure_policy` as vLLM's scheduler reads it. Call it while a worker's connector is made.

    The scheduler reads the outermost connector's configuration. A MultiConnector gives each child a copy of vLLM's
    configuration in which the child's `kv_transfer_config` replaces the outer one. While vLLM makes a worker, the
    original is the process's current configuration; in the scheduler's process a child has no way to find it.
    """
    from vllm.config.vllm import get_current_vllm_config_or_none

    outermost = get_current_vllm_config_or_none() or vllm_config
    return str(outermost.kv_transfer_config.kv_load_failure_policy)
