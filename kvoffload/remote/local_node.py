"""A Mooncake store node on the loopback, until it is killed: `python -m kvoffload.remote.local_node MASTER BYTES`."""

from __future__ import annotations

import sys
import threading

READY = "the node is ready"
_OWN_BUFFER = 2**24


def main(master: str, node_bytes: int) -> None:
    """Lend the store memory until this process is killed."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", node_bytes, _OWN_BUFFER, "tcp", "", master)
    if code:
        sys.exit(f"the master at {master} refuses the node (code {code})")
    sys.stdout.write(f"{READY}\n")
    sys.stdout.flush()
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
