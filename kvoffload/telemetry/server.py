"""A small HTTP server for one page of metrics. One thread a connection, none of them the engine's."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from io import BufferedIOBase, BufferedReader, RawIOBase
from socketserver import TCPServer, ThreadingMixIn
from types import TracebackType
from typing import TYPE_CHECKING, Any

from prometheus_client.exposition import choose_encoder

from kvoffload.model.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

DEFAULT_PORT = 9464
_PATH = "/metrics"
_CLIENT_TIMEOUT_S = 10  # a client that sends or reads nothing is cut off
_REQUEST_TIMEOUT_S = 30  # also one that does so little by little
_REQUEST_BYTES = 16384  # a scraper's request has some hundred
_CONNECTIONS = 16  # at a time; a scraper needs one


def serve(registry: CollectorRegistry, host: str = "127.0.0.1", port: int = DEFAULT_PORT) -> MetricsServer:
    """Serve GET /metrics of a registry until closed; port 0 takes any free one.

    Raises:
        ConfigError: the address cannot be used.
    """
    try:
        server = _Server(_address(host, port), registry)
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
    """Listens. Whoever can reach it can take no more of the process than some threads for some seconds."""

    allow_reuse_address = True
    daemon_threads = True  # a scraper that hangs does not keep the process alive
    block_on_close = False

    def __init__(
        self, address: tuple[socket.AddressFamily, tuple[Any, ...]], registry: CollectorRegistry
    ) -> None:
        self.registry = registry
        self.now: Callable[[], float] = time.monotonic
        self._open: dict[socket.socket, float] = {}
        self.address_family, where = address
        super().__init__(where, _Handler)

    def verify_request(self, request: object, client_address: object) -> bool:
        """Turn away who comes while too many are served."""
        return len(self._open) < _CONNECTIONS

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401  # as the base has it
        self._open[request] = self.now() + _REQUEST_TIMEOUT_S
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:  # noqa: ANN401  # as the base has it
        self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Several times a second, on the listening thread: cut off whoever has had time enough."""
        for request, deadline in list(self._open.items()):
            if self.now() > deadline:
                self._open.pop(request, None)
                with suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: a client that went away is not worth a traceback on the engine's terminal."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _CLIENT_TIMEOUT_S
    rbufsize = 0  # buffered behind the bound
    server_version, sys_version = "kvoffload", ""

    def setup(self) -> None:
        super().setup()
        self.rfile = BufferedReader(_Bounded(self.rfile, _REQUEST_BYTES))

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

    def __getattr__(self, name: str) -> Callable[[], None]:
        """Whatever else is asked, also by a name that nobody knows, is not allowed."""
        if name.startswith("do_"):
            return self._refuse
        raise AttributeError(name)

    def _refuse(self) -> None:
        self.send_response(HTTPStatus.METHOD_NOT_ALLOWED)
        self.send_header("Allow", "GET")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: one line a scrape would bury what matters."""


class _Bounded(RawIOBase):
    """What a client sends, cut off where it is more than any request."""

    def __init__(self, source: BufferedIOBase, size: int) -> None:
        self._source = source
        self._left = size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401  # as the base has it
        count = self._source.readinto(memoryview(buffer)[: self._left])
        self._left -= count
        return count

    def close(self) -> None:
        self._source.close()
        super().close()


def _address(host: str, port: int) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    if not 0 <= port <= 65535:  # the resolver would take it modulo 65536
        raise ValueError("a port is between 0 and 65535")
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
        0
    ]
    return family, where
