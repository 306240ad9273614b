"""The plugin's entry point. A stock vLLM calls `register` in every process, so importing this module must be fast."""

from __future__ import annotations

NAME = "KVOffloadConnector"
MODULE = "kvoffload_vllm.connector"


def register() -> None:
    """Register the connector with vLLM's factory. Further calls have no effect."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
    except ValueError:
        # An earlier call in this process has registered the connector.
        return
