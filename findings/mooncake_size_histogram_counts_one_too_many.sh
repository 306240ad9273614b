#!/bin/bash
# Expected: `master_value_size_bytes`, the master's "Distribution of object value sizes", has one sample for each object that
#   was stored: `_count` is the number of objects, and `_sum / _count` is their mean size.
# Happens: the first object after the master's start counts twice, in its bucket and in `_count`, and once in `_sum`. So after
#   one object of 1000 bytes the mean is 500, and `_count` is one too high as long as the master lives.
# Versions: Mooncake 0.3.13.post1 (mooncake-transfer-engine-non-cuda), Python 3.11, Debian's libibverbs1.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install mooncake-transfer-engine-non-cuda==0.3.13.post1
cd "$folder"
PATH="$folder/venv/bin:$PATH" "$folder/venv/bin/python" - <<'PYTHON' 2>client.log
import os
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from importlib.metadata import version

from mooncake.store import MooncakeDistributedStore


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


PORT, METRICS = free_port(), free_port()
NAME = "master_value_size_bytes"


def start_master():
    command = ["mooncake_master", "--rpc_port", PORT, "--rpc_address", "127.0.0.1", "--metrics_port", METRICS]
    with open("master.log", "wb") as log:
        master = subprocess.Popen([*map(str, command), "--metrics_host", "127.0.0.1"], stdout=log, stderr=log)
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", PORT), 1.0):
            return master
        time.sleep(0.05)


def scrape(*names):
    """Return the values of these samples."""
    with urllib.request.urlopen(f"http://127.0.0.1:{METRICS}/metrics", timeout=10) as answer:
        lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    samples = dict(line.rsplit(" ", 1) for line in lines)
    return tuple(int(float(samples[name])) for name in names)


master = start_master()
try:
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 2**26, 2**24, "tcp", "", f"127.0.0.1:{PORT}") == 0
    print("Mooncake", version("mooncake-transfer-engine-non-cuda"))
    seen = []
    for key in ("first", "second", "third"):
        assert store.put(key, bytes(1000)) == 0
        seen.append(scrape("master_key_count", f"{NAME}_count", f'{NAME}_bucket{{le="4096.000000"}}', f"{NAME}_sum"))
        print("{} objects: {}_count {}, bucket up to 4096 {}, _sum {}".format(seen[-1][0], NAME, *seen[-1][1:]))
finally:
    master.kill()
is_so = seen == [(1, 2, 2, 1000), (2, 3, 3, 2000), (3, 4, 4, 3000)]
print("as described" if is_so else "no longer as described")
sys.stdout.flush()
os._exit(not is_so)  # without the client's own end, which waits for the master
PYTHON
