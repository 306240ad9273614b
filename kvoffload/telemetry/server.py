"""Serves a registry's metrics over HTTP, by the server of prometheus_client."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from prometheus_client import start_http_server

from kvoffload.model.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

DEFAULT_PORT = 9464


def serve(registry: CollectorRegistry, host: str = "127.0.0.1", port: int = DEFAULT_PORT) -> MetricsServer:
    """Serve a registry until closed; port 0 takes any free one.

    Raises:
        ConfigError: the address cannot be used.
    """
    try:
        return MetricsServer(registry, host, port)
    except (OSError, ValueError, OverflowError) as error:  # the last two: no valid name, no valid port
        reason = getattr(error, "strerror", None) or str(error)
        advice = "choose another address, or port 0 for any free one"
        raise ConfigError([f"metrics cannot be served on {host}:{port} ({reason}); {advice}"]) from error


class MetricsServer:
    """A running server; close it, or use it in a `with` block."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        self._server, self._thread = start_http_server(port, host, registry)
        self.host, self.port = host, self._server.server_port

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/metrics"

    def close(self) -> None:
        """Stop listening. Closing twice is allowed."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
