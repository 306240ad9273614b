"""The policy by which vLLM acts when a load fails."""

from __future__ import annotations

import inspect
import traceback
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def find_failure_policy(vllm_config: VllmConfig) -> str:
    """Return `kv_load_failure_policy` as vLLM's scheduler reads it. To be called while the connector is constructed.

    The scheduler reads the configuration of the outermost connector. A MultiConnector constructs its children with
    copies of vLLM's configuration in which the child's `kv_transfer_config` has replaced the outer one. No hook, field
    or global variable of the scheduler's process leads a child back to that one, in any version up to 0.33; so it is
    read from the outermost connector whose constructor is on the stack.
    """
    transfer_config = vllm_config.kv_transfer_config
    for frame, _ in traceback.walk_stack(inspect.currentframe()):
        caller = frame.f_locals.get("self")
        if isinstance(caller, KVConnectorBase_V1):
            transfer_config = getattr(caller, "_kv_transfer_config", transfer_config)
    return str(transfer_config.kv_load_failure_policy)
