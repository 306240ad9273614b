#!/bin/bash
# Expected: vllm-router's default policy, `cache_aware`, sends a prompt that no worker has cached "to worker with smallest tree (most
#   cache capacity)", as its documentation of load balancing says. So different prompts, one after another, fill all workers' caches.
# Happens: such a prompt goes to the worker with the fewest requests in flight, and among idle workers always to the same one. Of three
#   workers, one gets all 30 prompts, and the caches of the other two stay empty, until requests overlap.
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


def send(url, content=None):
    body = None if content is None else json.dumps(content).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
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
router = subprocess.Popen([*command, "--worker-urls", *workers], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
try:
    url = f"http://127.0.0.1:{port}"
    while router.poll() is None and not is_ready(url):
        time.sleep(0.2)
    print("vllm-router", version("vllm-router"))
    seen = collections.Counter(dict.fromkeys((server.server_port for server in servers), 0))
    for number in range(NUMBER):
        prompt = [1000 * number + token for token in range(500)]
        seen[json.loads(send(url + "/v1/completions", {"model": "model", "prompt": prompt}))["worker"]] += 1
    metrics = send(f"http://127.0.0.1:{metrics_port}/metrics").decode()
    misses = sum(float(line.split()[-1]) for line in metrics.splitlines() if 'policy="cache_aware"' in line and "prefix_miss" in line)
finally:
    router.terminate()
    router.wait()
print(f"{NUMBER} different prompts, {misses:.0f} misses: the three workers got {sorted(seen.values())}")
is_so = sorted(seen.values()) == [0, 0, NUMBER] and misses == NUMBER
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
