"""The plugin's entry point, which a stock vLLM calls in every process. Imports nothing heavy."""

from __future__ import annotations

NAME = "KVOffloadConnector"
MODULE = "kvoffload_vllm.connector"


def register() -> None:
    """Register the connector with vLLM's factory. Further calls change nothing."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
    except ValueError:
        # This process has called register() before, so the name exists.
        return
