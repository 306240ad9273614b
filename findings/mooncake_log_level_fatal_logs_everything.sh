#!/bin/bash
# Expected: MC_LOG_LEVEL=FATAL makes Mooncake's client log at most as much as MC_LOG_LEVEL=ERROR. Its log has the form of
#   Google's glog, so GLOG_minloglevel=2 would do the same.
# Happens: ERROR works. FATAL is no level that the client knows, so it logs everything, as without the variable.
#   GLOG_minloglevel has no effect.
# Versions: Mooncake 0.3.13.post1 (mooncake-transfer-engine-non-cuda), Python 3.11, Debian's libibverbs1.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install mooncake-transfer-engine-non-cuda==0.3.13.post1
"$folder/venv/bin/python" - <<'PYTHON'
import os
import socket
import subprocess
import sys
import threading
from importlib.metadata import version

CONNECT = """
import sys
from mooncake.store import MooncakeDistributedStore
MooncakeDistributedStore().setup("127.0.0.1", "P2PHANDSHAKE", 0, 2**24, "tcp", "", sys.argv[1])
"""


def serve(listener):
    """Close each connection at once, so that the client's attempts to connect fail quickly."""
    while True:
        listener.accept()[0].close()


listener = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=serve, args=(listener,), daemon=True).start()
master = f"127.0.0.1:{listener.getsockname()[1]}"
print("Mooncake", version("mooncake-transfer-engine-non-cuda"))
lines = {}
for variable in ("", "GLOG_minloglevel=2", "MC_LOG_LEVEL=ERROR", "MC_LOG_LEVEL=FATAL"):
    name, _, value = variable.partition("=")
    environment = {**os.environ, **({name: value} if name else {})}
    ran = subprocess.run([sys.executable, "-c", CONNECT, master], env=environment, capture_output=True, check=True)
    lines[variable] = len(ran.stderr.splitlines())
    print(f"{variable or 'no variable'}: {lines[variable]} lines")
plain, glog, error, fatal = lines.values()
is_so = error < plain // 2 and min(glog, fatal) > 0.9 * plain
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
