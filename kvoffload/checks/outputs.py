"""Checks of everything that the engine writes to: lower tiers, the journal and the span collector."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from kvoffload.checks.check import Check, Finding, Setup, fail, ok, warn
from kvoffload.model.config import size_text
from kvoffload.model.errors import ConfigError, RemoteError
from kvoffload.remote.address import BucketAddress, MooncakeAddress, RemoteAddress, parse_address
from kvoffload.transfer.host_memory import read_file

_TIMEOUT_S = 2.0
_NETWORKED = ("nfs", "cifs", "smb3", "ceph", "9p", "virtiofs", "fuse")
_OTHER_SERVER = (
    "choose an S3 server with conditional writes, ranges, and listings in order that begin at start-after"
)
_UNTRIED = "neither its speed nor its free space was tried"
_IN_MEMORY = ("tmpfs", "ramfs")


def _disk_space(setup: Setup) -> Finding | None:
    path = setup.config.disk_path
    if path is None:
        return None
    needed = setup.sizes.engines * setup.config.disk_bytes
    try:
        free, ours = shutil.disk_usage(_existing(path)).free, _bytes_below(path)
    except OSError as error:
        return _unusable(path, error)
    if needed > free + ours:
        return warn(
            f"{size_text(needed)} are more than the {size_text(free)} that {path} has free: the engine would serve without the disk",
            "lower disk_bytes, or free space",
        )
    return ok(f"{size_text(needed)} fit {size_text(free)} free and {size_text(ours)} of earlier engines")


def _disk_folder(setup: Setup) -> Finding | None:
    from kvoffload.disk.folder import caution

    path = setup.config.disk_path
    if path is None:
        return None
    local = "name a folder on a local disk in disk_path"
    try:
        kind = _kind_of(_existing(path))
    except OSError as error:
        return _unusable(path, error)
    if kind in _IN_MEMORY:
        return warn(f"it is on {kind}, which is memory: a restart of the machine empties it", local)
    if kind.startswith(_NETWORKED):
        return warn(
            f"it is on {kind}, over a network: calls may hang, and requests would wait for them", local
        )
    if note := caution(path):
        return warn(note, "name a folder that only the engine's user can write to")
    try:
        reason = _try_folder(_existing(path))
    except OSError as error:
        return warn(f"{path} cannot be written: {error.strerror}", "name a folder of the engine's user")
    if reason is not None:
        return warn(
            f"reads and writes would go through the page cache ({reason})", f"{local}, on ext4 or XFS"
        )
    return ok(f"it is on {kind or 'a file system that the kernel does not name'}, and direct I/O works")


def _unusable(path: Path, error: OSError) -> Finding:
    """Return a finding about a folder at which this user may not look, or whose name is too long."""
    return warn(
        f"{path} cannot be used: {error.strerror}: the engine would serve without the disk",
        "name a folder of the engine's user in disk_path",
    )


def _try_folder(folder: Path) -> str | None:
    """Try direct I/O on a temporary file in `folder`. Return why direct I/O fails, or None if it works.

    Raises:
        OSError: the folder is not writable.
    """
    from kvoffload.disk.slot_file import go_direct
    from kvoffload.disk.system import PAGE, aligned_buffer

    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, PAGE)
        return go_direct(file.fileno(), aligned_buffer(PAGE))


def _existing(path: Path) -> Path:
    """Return the folder `path` if it exists, or else its nearest parent that exists."""
    return next((one for one in (path, *path.absolute().parents) if one.is_dir()), Path("/"))


def _bytes_below(path: Path) -> int:
    return sum(512 * one.lstat().st_blocks for one in path.rglob("*"))


def _kind_of(path: Path) -> str:
    """Return the type of the file system that contains `path`; empty if the type is not known."""
    mounts = {}
    for line in (read_file("/proc/self/mountinfo") or "").splitlines():
        fields, _, rest = line.partition(" - ")
        mounts[Path(fields.split()[4].encode().decode("unicode_escape"))] = rest.split()[0]
    above = (path.resolve(), *path.resolve().parents)
    return next((mounts[one] for one in above if one in mounts), "")


def _journal(setup: Setup) -> Finding | None:
    """Open the journal's file as an engine would, then restore the file's earlier state."""
    from kvoffload.telemetry.journal import JournalFile

    path = setup.config.journal_path
    if path is None:
        return None
    mode = path.stat().st_mode if os.path.exists(path) else None
    try:
        JournalFile(path).close()
    except ConfigError as error:
        return fail(str(error), "name a file in an existing folder of the engine's user")
    if mode is None:
        path.unlink()
    else:
        os.chmod(path, mode & 0o7777)
    return ok(str(path))


def _collector(setup: Setup) -> Finding | None:
    from kvoffload.telemetry.spans import check_exporter, endpoint_of

    endpoint = endpoint_of(setup.config)
    if endpoint is None:
        return None
    try:
        check_exporter(setup.config)
    except ConfigError as error:
        return fail(str(error), "correct this setting")
    url = urlsplit(endpoint if "//" in endpoint else f"//{endpoint}")  # a gRPC endpoint may lack a scheme
    port = url.port or (443 if url.scheme == "https" else 80)
    try:
        socket.create_connection((url.hostname or "", port), _TIMEOUT_S).close()
    except OSError as error:
        return warn(
            f"nothing answers at {url.hostname}:{port} now ({error.strerror or error}): spans would be lost",
            "start the collector, or change otlp_endpoint",
        )
    return ok(f"{url.hostname}:{port} answers")


def unreachable(address: RemoteAddress) -> Finding | None:
    """Return a finding with the reason why the remote tier cannot be used, or None if the tier answers."""
    return _tried(address)[0]


def _tried(address: RemoteAddress) -> tuple[Finding | None, list[str]]:
    """Return why the remote tier cannot be used, or None; and what the tier lacks, if an engine can do without it."""
    match address:
        case MooncakeAddress():
            return _no_mooncake(address), []
        case BucketAddress():
            return _no_bucket(address)


def _remote(setup: Setup) -> Finding | None:
    url = setup.config.remote_url
    if url is None:
        return None
    try:
        address = parse_address(url)
    except ConfigError as error:
        return fail(str(error), "correct remote_url")
    problem, lacks = _tried(address)
    if problem is not None:
        return problem
    if lacks:
        return warn("; ".join([*lacks, address.caution]).removesuffix("; "), _OTHER_SERVER)
    if address.caution:
        return warn(
            f"{address.caution}; {_UNTRIED}",
            "keep it in a network of engines and remote tiers only, or use TLS (S3)",
        )
    return ok(f"{address} answers; {_UNTRIED}")


def _no_mooncake(address: MooncakeAddress) -> Finding | None:
    try:
        from kvoffload.remote.mooncake import own_address
        from kvoffload.remote.mooncake_child import load_client

        load_client()
    except (ImportError, RemoteError) as error:
        return fail(
            f"the Mooncake client cannot be loaded: {error.__cause__ or error}",
            "pip install 'kvoffload[mooncake]' (with a GPU, the wheel for its CUDA), and install the package libibverbs1",
        )
    try:
        own_address(address, _TIMEOUT_S)
    except RemoteError as error:
        return warn(f"{error}: nothing would be shared", "start the master, or change remote_url")
    return None


def _no_bucket(address: BucketAddress) -> tuple[Finding | None, list[str]]:
    from kvoffload.remote.bucket import BucketStore
    from kvoffload.transfer.blocking_calls import PROBE

    try:
        bucket = BucketStore(address, _TIMEOUT_S)
        lacks = bucket.first_look()
    except RemoteError as error:
        if isinstance(error.__cause__, ImportError):
            text = f"the object store's client cannot be loaded: {error.__cause__}"
            return fail(text, "pip install 'kvoffload[s3]'"), []
        return warn(
            f"{error}: nothing would be shared",
            "check AWS_ENDPOINT, AWS_REGION, the bucket and the credentials",
        ), []
    try:
        # The object is not deleted, because an engine's credentials need not allow that.
        bucket.replace(PROBE, b"")
    except RemoteError as error:
        return warn(
            f"{error} on a write: this engine would read the bucket and add nothing to it",
            "let its credentials put objects",
        ), []
    return None, lacks


TIERS = (
    Check("disk space", _disk_space),
    Check("disk folder", _disk_folder),
    Check("remote tier", _remote),
)
CHECKS = (*TIERS, Check("journal", _journal), Check("span collector", _collector))
