"""HTTP servers that stand between a client and a bucket, or in a bucket's place."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right, insort
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    import pytest

BUCKET = "many"
Answer = tuple[int, dict[str, str], bytes]
_OBJECT = "<Contents><Key>{}</Key><Size>{}</Size><LastModified>2026-11-24T00:00:00.000Z</LastModified><ETag>0</ETag></Contents>"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, handler: type[_Handler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,))
        self._thread.start()

    def close(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def answer(self, status: int, headers: dict[str, str], body: bytes, cut_at: int | None = None) -> None:
        self.send_response_only(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.close_connection |= cut_at is not None
        with suppress(OSError):  # the client may have closed the connection
            self.end_headers()
            self.wfile.write(body[:cut_at])

    def log_message(self, *_: object) -> None:
        """Print nothing."""


class Proxy(_Server):
    """A proxy in front of an S3 server, which can be slow or silent, cut off answers, or refuse requests.

    It forwards requests unchanged, including the host and the signature.

    Attributes:
        refuse: returns the status with which to answer a request, or None to forward the request.
        gate: if set, every request waits until this event.
        seconds: how many seconds to delay each answer.
        cuts: whether to close every connection in the middle of an answer.
    """

    def __init__(self, upstream: int) -> None:
        self.upstream = upstream
        self.gate: threading.Event | None = None
        self.restore()
        super().__init__(_ProxyHandler)

    def restore(self) -> None:
        if self.gate is not None:
            self.gate.set()
        self.refuse: Callable[[str], int | None] = lambda _: None
        self.gate, self.seconds, self.cuts = None, 0.0, False


class _ProxyHandler(_Handler):
    server: Proxy

    def _serve(self) -> None:
        proxy, body = self.server, self.body()
        if proxy.gate is not None:
            proxy.gate.wait()
        time.sleep(proxy.seconds)
        if (status := proxy.refuse(self.command)) is not None:
            self.answer(status, {}, b"", cut_at=0 if proxy.cuts else None)
            return
        upstream = HTTPConnection("127.0.0.1", proxy.upstream)
        upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            upstream.putheader(name, value)
        upstream.endheaders(body)
        answer = upstream.getresponse()
        body, omitted = answer.read(), ("transfer-encoding", "connection", "content-length")
        headers = {name: value for name, value in answer.getheaders() if name.lower() not in omitted}
        self.answer(answer.status, headers, body, cut_at=len(body) // 2 if proxy.cuts else None)
        upstream.close()

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _serve  # `http.server` calls these names


class S3Server(_Server):
    """A bucket in memory that counts requests, for buckets too large or too unusual for a real server.

    Attributes:
        objects: the objects by name; `put` keeps the names sorted.
        lists: for each listing request, the name at which the listing begins.
        gets: for each read request, the name of the object.
        sizes: sizes that listings report, for objects whose real size differs.
        refuses: the status with which reads of these names are answered.
        page: the number of names in one listing.
        together: if set, reads wait at this barrier.
        is_endless: whether every page of a listing is empty and followed by another page.
        lacks: what the server ignores: "conditions" of writes, "ranges" of reads, "start-after" in listings.
        override: returns status, headers and body with which to answer a request, or None to serve the request.
    """

    def __init__(self) -> None:
        self.lacks: set[str] = set()
        self.override: Callable[[BaseHTTPRequestHandler], Answer | None] = lambda _: None
        self.objects: dict[str, bytes] = {}
        self.names: list[str] = []
        self.lists: list[str] = []
        self.gets: list[str] = []
        self.sizes: dict[str, int] = {}
        self.refuses: dict[str, int] = {}
        self.together: threading.Barrier | None = None
        self.page, self.is_endless = 1000, False
        super().__init__(_S3Handler)

    def reach(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Set the environment variables by which clients in this process find this server."""
        monkeypatch.setenv("AWS_ENDPOINT", self.endpoint)
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        for name in ("AWS_ALLOW_HTTP", "AWS_SKIP_SIGNATURE"):
            monkeypatch.setenv(name, "true")

    def put(self, name: str, data: bytes) -> None:
        if name not in self.objects:
            insort(self.names, name)
        self.objects[name] = data


class _S3Handler(_Handler):
    server: S3Server

    def _serve(self) -> None:
        body = self.body()
        if (override := self.server.override(self)) is not None:
            status, headers, answer = override
            self.close_connection |= status < 200
            self.answer(status, headers, answer)
        elif self.command == "PUT":
            self._put(body)
        else:
            self._get()

    do_GET = do_PUT = _serve  # `http.server` calls these names

    def _get(self) -> None:
        server, url = self.server, urlsplit(self.path)
        name = unquote(url.path).removeprefix(f"/{BUCKET}").removeprefix("/")
        if not name:
            self._list({key: values[0] for key, values in parse_qs(url.query).items()})
            return
        server.gets.append(name)
        if server.together is not None:
            server.together.wait()
        data = server.objects.get(name)
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        if name in server.refuses:
            self._answer(server.refuses[name], b"")
        elif data is None:
            self._answer(404, b"")
        elif "ranges" in server.lacks:
            self._answer(200, data)
        elif first >= len(data):
            self._answer(416, b"")
        else:
            part = data[first : last + 1]
            self._answer(206, part, {"Content-Range": f"bytes {first}-{first + len(part) - 1}/{len(data)}"})

    def _put(self, body: bytes) -> None:
        name = unquote(urlsplit(self.path).path).removeprefix(f"/{BUCKET}/")
        has_condition = "If-None-Match" in self.headers and "conditions" not in self.server.lacks
        if has_condition and name in self.server.objects:
            return self._answer(412, b"")
        self.server.put(name, body)
        return self._answer(200, b"")

    def _list(self, asked: dict[str, str]) -> None:
        server = self.server
        if "start-after" in server.lacks:
            asked.pop("start-after", None)
        begins = max(asked.get("start-after", ""), asked.get("continuation-token", ""), asked["prefix"])
        server.lists.append(begins)
        if server.is_endless:
            return self._answer_list([], more_from=begins)
        at = bisect_right(server.names, begins)
        names = [name for name in server.names[at : at + server.page] if name.startswith(asked["prefix"])]
        is_cut = len(names) == server.page and at + server.page < len(server.names)
        return self._answer_list(names, more_from=names[-1] if is_cut else None)

    def _answer_list(self, names: list[str], *, more_from: str | None) -> None:
        sizes = {**{name: len(self.server.objects.get(name, b"")) for name in names}, **self.server.sizes}
        contents = "".join(_OBJECT.format(escape(name), sizes[name]) for name in names)
        more = "<IsTruncated>false</IsTruncated>"
        if more_from is not None:
            token = f"<NextContinuationToken>{escape(more_from)}</NextContinuationToken>"
            more = f"<IsTruncated>true</IsTruncated>{token}"
        self._answer(200, f"<ListBucketResult>{more}{contents}</ListBucketResult>".encode())

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        always = {"ETag": '"0"', "Last-Modified": "Tue, 24 Nov 2026 00:00:00 GMT"}
        self.answer(status, {**always, **(headers or {})}, body)
