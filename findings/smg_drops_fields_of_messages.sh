#!/bin/bash
# Expected: a gateway passes on what the client wrote, so that a prompt is the same with and without it. smg, the gateway of SGLang and
#   vLLM, passes unknown fields of the request and of a tool's function on, and refuses what it cannot read. Chat templates read
#   `name` of a tool's message (which tool answered), and Mistral's clients set `prefix` to have an answer continued.
# Happens: fields of a message that smg does not know are dropped without an error: `name` of a tool's message, `prefix`, the
#   `cache_control` of a part. `reasoning` is renamed to `reasoning_content`. The engine gets another prompt, with other blocks.
# Versions: smg 1.13.0, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install smg==1.13.0
cd "$folder"
venv/bin/python - <<'PYTHON'
import http.server
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from importlib.metadata import version

MESSAGES = [
    {"role": "system", "content": [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]},
    {"role": "user", "content": "What is the weather?", "name": "alice"},
    {"role": "assistant", "content": "Let me see.", "reasoning": "I need a tool.", "prefix": True},
    {"role": "tool", "content": "sunny", "tool_call_id": "1", "name": "weather"},
]


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
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer({"id": "1", "object": "chat.completion", "choices": [], "request": request})

    def log_message(self, *_):
        pass


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def send(url, content=None):
    body = None if content is None else json.dumps(content).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read()


def answer_of(url, content):
    """Return the answer as soon as the gateway has found its worker."""
    for _ in range(100):
        try:
            return json.loads(send(url, content))
        except OSError:
            time.sleep(0.2)
    sys.exit("the gateway does not answer")


worker = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Worker)
threading.Thread(target=worker.serve_forever, daemon=True).start()
port, metrics_port = free_port(), free_port()
command = ["venv/bin/smg", "launch", "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port)]
command += ["--worker-urls", f"http://127.0.0.1:{worker.server_port}", "--policy", "round_robin"]
gateway = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
try:
    print("smg", version("smg"))
    content = {"model": "model", "messages": MESSAGES, "unknown": {"a": 1}}
    request = answer_of(f"http://127.0.0.1:{port}/v1/chat/completions", content)["request"]
finally:
    gateway.terminate()
    gateway.wait()
lost = []
for sent, received in zip(MESSAGES, request["messages"], strict=True):
    lost.append(sorted(sent.keys() - received.keys()))
    print(f"sent {sent}\n  got {received}, without {lost[-1]}")
print("the request's own unknown field:", request.get("unknown"))
part = request["messages"][0]["content"][0]
is_so = lost == [[], [], ["prefix", "reasoning"], ["name"]] and "cache_control" not in part and request["unknown"] == {"a": 1}
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
