"""An HTTP proxy in front of an S3 server. The proxy can be slow or silent, cut off answers, or refuse requests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.gates import ThreadGate


class Proxy(ThreadingHTTPServer):
    """Forwards requests unchanged, including the host and the signature.

    Attributes:
        requests: the method and path of each request, in order.
        refuse: returns the status with which to answer a method, or None to forward the request.
        gate: if set, every request waits at this gate.
        seconds: how many seconds to delay each answer.
        cuts: whether to close every connection in the middle of an answer.
    """

    daemon_threads = True

    def __init__(self, upstream: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = upstream
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.requests: list[str] = []
        self.restore()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,))
        self._thread.start()

    def restore(self) -> None:
        self.refuse: Callable[[str], int | None] = lambda _: None
        self.gate: ThreadGate | None = None
        self.seconds, self.cuts = 0.0, False
        self.late = threading.Event()

    def end(self) -> None:
        if self.gate is not None:
            self.gate.open()
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def _serve(self) -> None:
        proxy = self.server
        proxy.requests.append(f"{self.command} {self.path}")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if proxy.gate is not None:
            proxy.gate.arrive()
        if proxy.seconds:
            proxy.late.wait(proxy.seconds)
        if (status := proxy.refuse(self.command)) is not None:
            self._answer(status, [], b"")
            return
        upstream = HTTPConnection("127.0.0.1", proxy.upstream)
        upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            upstream.putheader(name, value)
        upstream.endheaders(body)
        answer = upstream.getresponse()
        self._answer(answer.status, answer.getheaders(), answer.read())
        upstream.close()

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _serve  # `http.server` calls these names

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        with suppress(OSError):
            self.end_headers()
        if self.server.cuts:
            self.close_connection = True
            body = body[: len(body) // 2]
        with suppress(OSError):  # the client may have closed the connection
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""
