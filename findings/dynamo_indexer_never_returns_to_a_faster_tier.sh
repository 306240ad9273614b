#!/bin/bash
# Expected: Dynamo's indexer, which "indexes device, host-pinned, and disk tier blocks", says how many tokens of a prompt a
#   worker has, in whatever tiers. A worker with block 1 in its host's memory, block 2 on its disk and block 3 in its host's
#   memory has all three blocks.
# Happens: the search goes from the GPU to the host's memory to the disk and never back. So it finds blocks 1 and 2, and not
#   block 3, which is in the faster tier. With block 3 on the disk too it finds all three.
# Versions: ai-dynamo-runtime 1.6.1 (`python -m dynamo.indexer`), pyzmq 27.3.0, msgspec 0.22.0, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install ai-dynamo-runtime==1.6.1 pyzmq==27.3.0 msgspec==0.22.0
cd "$folder"
venv/bin/python - <<'PYTHON'
import json
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from importlib.metadata import version

import msgspec
import zmq

TOKENS = list(range(12))  # three blocks of 4 tokens
PLACES = [("CPU", "CPU", "CPU"), ("CPU", "DISK", "DISK"), ("CPU", "DISK", "CPU"), ("GPU", "DISK", "CPU")]


def stored(block, medium):
    """Return vLLM's event of one stored block of the prompt, as it stands on the wire."""
    return ["BlockStored", [block], block - 1 or None, TOKENS[4 * block - 4 : 4 * block], 4, None, medium]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def send(publisher, number, event):
    publisher.send_multipart([b"", struct.pack(">q", number), msgspec.msgpack.encode([time.time(), [event], 0])])


def ask(path, question=None):
    """Return the indexer's answer, decoded."""
    data = None if question is None else json.dumps(question).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{http}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as response:
        return json.loads(response.read())


def matched(worker):
    """Return how many tokens of the prompt the worker has, in whatever medium."""
    answer = ask("/query", {"token_ids": TOKENS, "model_name": "default"})
    return answer["instances"].get(str(worker), {}).get("longest_matched", 0)


def wait_for(worker, tokens):
    """Return the tokens that the worker has, as soon as they are so many or after 3 seconds."""
    ends = time.monotonic() + 3
    while matched(worker) != tokens and time.monotonic() < ends:
        time.sleep(0.05)
    return matched(worker)


http, context = free_port(), zmq.Context.instance()
publishers = [context.socket(zmq.XPUB) for _ in PLACES]
addresses = [f"tcp://127.0.0.1:{publisher.bind_to_random_port('tcp://127.0.0.1')}" for publisher in publishers]
workers = ",".join(f"{worker}={address}" for worker, address in enumerate(addresses))
command = [sys.executable, "-m", "dynamo.indexer", "--port", str(http), "--block-size", "4", "--workers", workers]
with open("log", "wb") as log:
    indexer = subprocess.Popen(command, stdout=log, stderr=log)
seen = {}
try:
    for publisher in publishers:
        publisher.recv()  # the indexer's subscription
    ready = False
    while not ready:
        with suppress(OSError):
            ready = ask("/workers") is not None
        time.sleep(0.05)
    print("ai-dynamo-runtime", version("ai-dynamo-runtime"))
    for worker, (media, publisher) in enumerate(zip(PLACES, publishers)):
        for block, medium in enumerate(media, 1):
            send(publisher, block - 1, stored(block, medium))
        seen[media] = wait_for(worker, 12)
        print(f"blocks 1, 2, 3 in {', '.join(media)}: {seen[media]} of 12 tokens")
finally:
    indexer.terminate()
    indexer.wait()
is_so = list(seen.values()) == [12, 12, 8, 8]
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
