#!/bin/bash
# Expected: after a Mooncake master was restored from a snapshot, an object that was replaced (`upsert`) since the snapshot
#   has the value of the snapshot's time, or is missing: a snapshot is a point in time.
# Happens: it depends on the two values' lengths. A snapshot has the list of objects, not their bytes. A replacement of the
#   same length goes to the same memory, so the restored master returns the new value. A replacement of another length goes
#   elsewhere, so the restored master returns the old value again. Both calls returned 0.
# Versions: Mooncake 0.3.13.post1 (mooncake-transfer-engine-non-cuda), Python 3.11, Debian's libibverbs1.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install mooncake-transfer-engine-non-cuda==0.3.13.post1
cd "$folder"
PATH="$folder/venv/bin:$PATH" "$folder/venv/bin/python" - <<'PYTHON' 2>client.log
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from mooncake.store import MooncakeDistributedStore, ReplicateConfig


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


PORT, METRICS = free_port(), free_port()


def start_master(*options):
    command = ["mooncake_master", "--rpc_port", PORT, "--rpc_address", "127.0.0.1", "--metrics_port", METRICS]
    command += ["--metrics_host", "127.0.0.1", *options]
    with open("master.log", "ab") as log:
        master = subprocess.Popen([*map(str, command)], stdout=log, stderr=log, start_new_session=True)
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", PORT), 1.0):
            return master
        assert master.poll() is None, Path("master.log").read_text()
        time.sleep(0.05)


def connect(lent=0):
    """Connect, and lend the store this many bytes of this process's memory."""
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", lent, 2**24, "tcp", "", f"127.0.0.1:{PORT}") == 0
    return store


os.environ["MOONCAKE_SNAPSHOT_LOCAL_PATH"] = str(Path("snapshots").absolute())
SNAPSHOTS = [
    "--enable_snapshot=true", "--enable_snapshot_restore=true", "--snapshot_object_store_type=local",
    "--snapshot_interval_seconds=1", "--snapshot_retention_count=1000",
]


def wait_for_snapshots(count):
    """Wait until the master has completed this many further snapshots."""
    seen = {each.read_text() for each in Path("snapshots").rglob("latest.txt")}
    count += len(seen)
    while len(seen) < count:
        seen |= {each.read_text() for each in Path("snapshots").rglob("latest.txt")}
        time.sleep(0.1)


def restart(master, *options):
    os.killpg(master.pid, signal.SIGKILL)  # with the child that writes a snapshot
    master.wait()
    return start_master(*options)


print("Mooncake", version("mooncake-transfer-engine-non-cuda"))
# The long lease is needed because a restored master drops objects whose lease has ended.
options = [*SNAPSHOTS, "--default_kv_lease_ttl=3600000"]
master = start_master(*options)
node, client = connect(2**26), connect()
client.put("same length", b"old value")
client.put("another length", b"old value")
assert client.batch_is_exist(["same length", "another length"]) == [1, 1]  # this starts the leases
wait_for_snapshots(2)
shutil.copytree("snapshots", "kept")
assert client.upsert("same length", b"new value") == client.upsert("another length", b"newer value") == 0
before = client.get("same length"), client.get("another length")
os.environ["MOONCAKE_SNAPSHOT_LOCAL_PATH"] = str(Path("kept").absolute())
master = restart(master, *options)
reader, ends = connect(), time.monotonic() + 30
while reader.batch_is_exist(["same length", "another length"]) != [1, 1] and time.monotonic() < ends:
    time.sleep(0.2)
after = reader.get("same length"), reader.get("another length")
master.kill()
print("before the restart:", *before)
print("restored:          ", *after)
is_so = before == (b"new value", b"newer value") and after == (b"new value", b"old value")
print("as described" if is_so else "no longer as described")
sys.stdout.flush()
os._exit(not is_so)  # without the client's own end, which waits for the master
PYTHON
