#!/bin/bash
# Expected: with `--policy consistent_hash`, vllm-router takes the key from the first of these that a request has: a header such as
#   X-Session-ID, the body's `session_params.session_id`, `user`, `session_id`, `user_id`, or a hash of the whole body. Its
#   documentation of load balancing lists them in this order. So the requests of one user go to one worker, and those without a key to all.
# Happens: `user` has no effect. Completions of one user go to all three workers, by their prompts. Chats all go to the same
#   worker, with a user, with another one and with none: the cache and the time of the other workers are never used. The header works.
# Versions: vllm-router 0.1.17, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install vllm-router==0.1.17
cd "$folder"
venv/bin/python - <<'PYTHON'
import collections
import http.server
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from importlib.metadata import version

NUMBER = 30


class Worker(http.server.BaseHTTPRequestHandler):
    def answer(self, content):
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer({"object": "list", "data": [{"id": "model", "object": "model"}]})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer({"id": "1", "object": "text_completion", "choices": [], "worker": self.server.server_port})

    def log_message(self, *_):
        pass


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def chat(text):
    return {"messages": [{"role": "user", "content": text}]}


def send(url, content=None, headers=()):
    body = None if content is None else json.dumps(content).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", **dict(headers)})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read()


def is_ready(url):
    try:
        send(url + "/readiness")
    except OSError:
        return False
    return True


servers = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), Worker) for _ in range(3)]
for server in servers:
    threading.Thread(target=server.serve_forever, daemon=True).start()
workers = [f"http://127.0.0.1:{server.server_port}" for server in servers]
port, metrics_port = free_port(), free_port()
command = ["venv/bin/vllm-router", "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port)]
command += ["--policy", "consistent_hash"]
router = subprocess.Popen([*command, "--worker-urls", *workers], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
try:
    url = f"http://127.0.0.1:{port}"
    while router.poll() is None and not is_ready(url):
        time.sleep(0.2)
    print("vllm-router", version("vllm-router"))
    seen = {}
    for name, user, headers in (("no key", {}, {}), ("user", {"user": "alice"}, {}), ("header", {}, {"X-Session-ID": "alice"})):
        for path, prompt_of in (("/v1/completions", lambda text: {"prompt": text}), ("/v1/chat/completions", chat)):
            counts = collections.Counter()
            for number in range(NUMBER):
                content = {"model": "model", **prompt_of(f"Question {7919 * number}"), **user}
                counts[json.loads(send(url + path, content, headers))["worker"]] += 1
            seen[name, path] = sorted(counts.values())
            print(f"{path}, {name}: {NUMBER} different prompts went to {len(counts)} of 3 workers, {seen[name, path]}")
finally:
    router.terminate()
    router.wait()
one, chats = [NUMBER], "/v1/chat/completions"
is_so = all(len(seen[name, "/v1/completions"]) > 1 and seen[name, chats] == one for name in ("no key", "user"))
is_so &= seen["header", "/v1/completions"] == seen["header", chats] == one
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
