#!/bin/bash
# Expected: a master that logs "Successfully restored state from snapshot" has the objects of the snapshot, at least those
#   with a hard pin, which are never evicted.
# Happens: it has only objects whose read lease (by default 10 s, begun by a question or a read) lasts beyond the restart.
#   All others are gone, with a hard pin or not, though the nodes still have their bytes.
# Versions: Mooncake 0.3.13.post1 (mooncake-transfer-engine-non-cuda), Python 3.11, Debian's libibverbs1.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install mooncake-transfer-engine-non-cuda==0.3.13.post1
cd "$folder"
PATH="$folder/venv/bin:$PATH" "$folder/venv/bin/python" - <<'PYTHON' 2>client.log
import os
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
options = [*SNAPSHOTS, "--default_kv_lease_ttl=3600000"]
master = start_master(*options)
node, client, pinned = connect(2**26), connect(), ReplicateConfig()
pinned.with_hard_pin = True
NAMES = ["plain", "with a hard pin", "with a lease"]
codes = client.put("plain", b"value"), client.put("with a hard pin", b"value", pinned), client.put("with a lease", b"value")
assert codes == (0, 0, 0)
assert client.is_exist("with a lease") == 1
wait_for_snapshots(2)
master = restart(master, *options)
reader, ends, found = connect(), time.monotonic() + 15, [0, 0, 0]
while found != [1, 1, 1] and time.monotonic() < ends:
    found = reader.batch_is_exist(NAMES)
    time.sleep(0.2)
master.kill()
has_logged = "Successfully restored state from snapshot" in Path("master.log").read_text()
print("logged as restored:", has_logged)
for name, code in zip(NAMES, found):
    print(f"{name}: {'there' if code == 1 else 'gone'}")
is_so = has_logged and found == [0, 0, 1]
print("as described" if is_so else "no longer as described")
sys.stdout.flush()
os._exit(not is_so)  # without the client's own end, which waits for the master
PYTHON
