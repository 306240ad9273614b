#!/bin/bash
# Expected: an event of a stream of server-sent events ends with an empty line. The HTML standard says what happens to one without it, because
#   the connection broke: "Once the end of the file is reached, any pending data must be discarded." httpx-sse does so. A client of an
#   LLM server then sees whole pieces of the answer only.
# Happens: sseclient-py delivers what came of the event, as if it were complete and without an error. If `data: 1024` was cut off after the
#   second digit, the last event is "10".
# Versions: sseclient-py 1.9.0, httpx-sse 0.4.3, httpx 0.28.1, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install sseclient-py==1.9.0 httpx-sse==0.4.3 httpx==0.28.1
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys
from importlib.metadata import version

import httpx
import httpx_sse
import sseclient

WHOLE = b"data: 512\n\ndata: 1024\n\n"


class Body(httpx.SyncByteStream):
    def __init__(self, content):
        self.content = content

    def __iter__(self):
        yield self.content


def by_sseclient(content):
    return [event.data for event in sseclient.SSEClient(Body(content)).events()]


def by_httpx_sse(content):
    answer = httpx.Response(200, headers={"Content-Type": "text/event-stream"}, stream=Body(content))
    return [event.data for event in httpx_sse.EventSource(answer).iter_sse()]


print("sseclient-py", version("sseclient-py"), "httpx-sse", version("httpx-sse"))
seen = {}
for end in (b"24\n\n", b"\n\n", b"\n"):
    content = WHOLE.removesuffix(end)
    seen[content] = by_sseclient(content), by_httpx_sse(content)
    print(f"{content}: sseclient-py delivers {seen[content][0]}, httpx-sse {seen[content][1]}")
seen[WHOLE] = by_sseclient(WHOLE), by_httpx_sse(WHOLE)
print(f"{WHOLE}: sseclient-py delivers {seen[WHOLE][0]}, httpx-sse {seen[WHOLE][1]}")
is_so = seen == {
    b"data: 512\n\ndata: 10": (["512", "10"], ["512"]),
    b"data: 512\n\ndata: 1024": (["512", "1024"], ["512"]),
    b"data: 512\n\ndata: 1024\n": (["512", "1024"], ["512"]),
    WHOLE: (["512", "1024"], ["512", "1024"]),
}
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
