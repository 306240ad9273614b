"""What a stock vLLM calls in every process: makes the connector known by name. Imports nothing heavy."""

from __future__ import annotations

NAME = "KVOffloadConnector"
MODULE = "kvoffload_vllm.connector"


def register() -> None:
    """Make the connector known to vLLM's factory. Harmless when called again."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
    except ValueError:
        # The name exists: another call of ours, in the same process.
        return
