"""An S3 server in memory that counts requests, for buckets too large or too unusual for a real server."""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    import pytest

BUCKET = "many"
_OBJECT = "<Contents><Key>{}</Key><Size>{}</Size><LastModified>2026-11-24T00:00:00.000Z</LastModified><ETag>0</ETag></Contents>"


class S3Server(ThreadingHTTPServer):
    """An S3 server with one bucket.

    Attributes:
        objects: the objects by name; `put` keeps the names sorted.
        lists: for each listing request, the name at which the listing begins.
        gets: for each read request, the name of the object.
        sizes: sizes that listings report, for objects whose real size differs.
        refuses: the status with which reads of these names are answered.
        page: the number of names in one listing.
        is_endless: whether every page of a listing is empty and followed by another page.
    """

    daemon_threads = True
    request_queue_size = 256

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.names: list[str] = []
        self.lists: list[str] = []
        self.gets: list[str] = []
        self.sizes: dict[str, int] = {}
        self.refuses: dict[str, int] = {}
        self.page = 1000
        self.is_endless = False
        self.url = f"s3://{BUCKET}"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,))
        self._thread.start()

    def reach(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Set the environment variables by which clients in this process find this server."""
        monkeypatch.setenv("AWS_ENDPOINT", f"http://127.0.0.1:{self.server_port}")
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")

    def put(self, name: str, data: bytes) -> None:
        if name not in self.objects:
            insort(self.names, name)
        self.objects[name] = data

    def forget_requests(self) -> None:
        self.lists.clear()
        self.gets.clear()

    def end(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    server: S3Server

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        name = unquote(url.path).removeprefix(f"/{BUCKET}").removeprefix("/")
        if not name:
            self._list({key: values[0] for key, values in parse_qs(url.query).items()})
            return
        self.server.gets.append(name)
        data = self.server.objects.get(name)
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        if name in self.server.refuses:
            self._answer(self.server.refuses[name], b"")
        elif data is None:
            self._answer(404, b"")
        elif first >= len(data):
            self._answer(416, b"")
        else:
            part = data[first : last + 1]
            self._answer(206, part, f"bytes {first}-{first + len(part) - 1}/{len(data)}")

    def do_PUT(self) -> None:
        name = unquote(urlsplit(self.path).path).removeprefix(f"/{BUCKET}/")
        self.server.put(name, self.rfile.read(int(self.headers["Content-Length"])))
        self._answer(200, b"")

    def _list(self, asked: dict[str, str]) -> None:
        server = self.server
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

    def _answer(self, status: int, body: bytes, content_range: str | None = None) -> None:
        self.send_response_only(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"0"')
        self.send_header("Last-Modified", "Tue, 24 Nov 2026 00:00:00 GMT")
        if content_range is not None:
            self.send_header("Content-Range", content_range)
        with suppress(OSError):  # the client may have closed the connection
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""
