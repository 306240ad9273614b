"""A small HTTP server for one page of metrics. One thread a connection, none of them the engine's."""

from __future__ import annotations

import socket
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from types import TracebackType
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from kvoffload.model.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

DEFAULT_PORT = 9464
_PATH = "/metrics"
_CLIENT_TIMEOUT_S = 10  # a client that sends or reads nothing is cut off


def serve(
    source: CollectorRegistry | Collector, host: str = "127.0.0.1", port: int = DEFAULT_PORT
) -> MetricsServer:
    """Serve GET /metrics of a registry, or of one collector, until closed; port 0 takes any free one.

    Raises:
        ConfigError: the address cannot be used.
    """
    try:
        server = _Server(_address(host, port), _registry_of(source))
    except (OSError, ValueError) as exc:  # the latter for a name that is none
        reason = getattr(exc, "strerror", None) or str(exc)
        advice = "choose another address, or port 0 for any free one"
        raise ConfigError([f"metrics cannot be served on {host}:{port} ({reason}); {advice}"]) from exc
    return MetricsServer(server)


class MetricsServer:
    """A server that runs; close it, or use it in a `with` block."""

    def __init__(self, server: _Server) -> None:
        self._server = server
        self.host, self.port = str(server.server_address[0]), int(server.server_address[1])
        self._thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.05}, name="kvoffload-metrics", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}{_PATH}"

    def close(self) -> None:
        """Stop listening. A scrape under way ends by itself. Closing twice is fine."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Server(ThreadingMixIn, TCPServer):
    allow_reuse_address = True
    daemon_threads = True  # a scraper that hangs does not keep the process alive
    block_on_close = False

    def __init__(
        self, address: tuple[socket.AddressFamily, tuple[Any, ...]], registry: CollectorRegistry
    ) -> None:
        self.registry = registry
        self.address_family, where = address
        super().__init__(where, _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: a client that went away is not worth a traceback on the engine's terminal."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _CLIENT_TIMEOUT_S

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != _PATH:
            self.send_error(HTTPStatus.NOT_FOUND, f"only {_PATH} is served here")
            return
        encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        try:
            page = encode(self.server.registry)
        except Exception as exc:  # whatever a collector raises, the scraper must see that it failed
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR, f"collecting failed: {type(exc).__name__}")
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def do_HEAD(self) -> None:
        self._refuse()

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = do_HEAD

    def _refuse(self) -> None:
        self.send_response(HTTPStatus.METHOD_NOT_ALLOWED)
        self.send_header("Allow", "GET")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: one line a scrape would bury what matters."""


def _registry_of(source: CollectorRegistry | Collector) -> CollectorRegistry:
    if isinstance(source, CollectorRegistry):
        return source
    registry = CollectorRegistry()
    registry.register(source)
    return registry


def _address(host: str, port: int) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    if not 0 <= port <= 65535:  # the resolver would take it modulo 65536
        raise ValueError("a port is between 0 and 65535")
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
        0
    ]
    return family, where
