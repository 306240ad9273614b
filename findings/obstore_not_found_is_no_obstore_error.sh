#!/bin/bash
# Expected: every error of an S3 store is an obstore.exceptions.BaseError, and a missing object is a NotFoundError, which
#   obstore.exceptions exports.
# Happens: the status 404 raises the builtin FileNotFoundError, which is neither. Every other status checked here raises
#   a BaseError. So `except BaseError`, written to keep a server's text out of a log, lets exactly the 404 pass, and its
#   text quotes the server's whole answer. A listing of a missing bucket is a GenericError all the same.
# Versions: obstore 0.12.1, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install obstore==0.12.1
"$folder/venv/bin/python" - <<'PYTHON'
import sys
import threading
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

import obstore
from obstore.exceptions import BaseError, NotFoundError
from obstore.store import S3Store

BODY = b"<Error><Code>NoSuchBucket</Code><Message>words of the server</Message></Error>"


class Answer(BaseHTTPRequestHandler):
    status = 404

    def do_GET(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response_only(Answer.status)
        self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()
        self.wfile.write(BODY)

    do_PUT = do_GET

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
threading.Thread(target=server.serve_forever, daemon=True).start()
store = S3Store(
    "bucket", endpoint=f"http://127.0.0.1:{server.server_port}", region="us-east-1", access_key_id="key",
    secret_access_key="secret", client_options={"allow_http": True},
    retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=5)},
)
CALLS = {
    "get": lambda: obstore.get(store, "name"),
    "put": lambda: obstore.put(store, "name", b"data"),
    "list": lambda: list(obstore.list(store)),
}
print("obstore", version("obstore"))
seen = {}
for Answer.status in (400, 403, 404, 409, 412, 500):
    for name, call in CALLS.items():
        try:
            call()
        except Exception as error:
            seen[name, Answer.status] = error
            print(Answer.status, name, type(error).__name__, "BaseError:", isinstance(error, BaseError))
strays = {call for call, error in seen.items() if not isinstance(error, BaseError)}
is_so = strays == {("get", 404), ("put", 404)}
for call in strays:
    is_so &= type(seen[call]) is FileNotFoundError and not isinstance(seen[call], NotFoundError)
    is_so &= "words of the server" in str(seen[call])
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
