"""Keeps the data of KV cache events for the next engine, which can then announce the blocks that it finds.

    | header: magic, version, bytes of a block's tokens | record of each slot: check, depth, length of parent, parent, tokens |

A file lies beside the host's table, and another one beside the disk's index. A record counts if its check fits the
slot's key, so a record of an earlier block of the slot is harmless. Blocks of adapters, and blocks whose hash covers
more than tokens, get no record: they are announced with their first use.

The files have the tokens of prompts, readable for this user only. They are written only while vLLM publishes events.
"""

from __future__ import annotations

import mmap
import os
import struct
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from kvoffload.disk.open_folder import OpenFolder
from kvoffload.disk.system import PAGE
from kvoffload.logs import get_logger
from kvoffload.model.errors import DiskError
from kvoffload.model.ids import BlockKey, SlotId

log = get_logger("host")

_NAME = "notes"
_HEADER = struct.Struct("<8sII")
_MAGIC, _VERSION = b"KVONOTES", 1
_PARENT_BYTES = 64
_RECORD = struct.Struct(f"<QIB{_PARENT_BYTES}s")
_MOST_READ = 2**28  # the size of the largest file beside a disk's index that is read at a start
_MOST_UNWRITTEN = 2**16  # how many records wait for the disk's thread at most; further ones are dropped


class KeptNote(NamedTuple):
    """What an event needs to know of a block.

    Args:
        depth: how many blocks of this group precede it in its prompt.
        parent: the hash of the block before; None for a prompt's first block.
        tokens: the block's token ids as packed bytes.
    """

    depth: int
    parent: bytes | None
    tokens: bytes


class KeptNotes:
    """The notes beside the host's table, in memory that the next engine finds.

    `open` may run on any thread, everything else runs on the engine's.

    Args:
        block_tokens: the largest number of tokens in a block.
    """

    def __init__(self, block_tokens: int) -> None:
        self._token_bytes = 4 * block_tokens
        self._pitch = _RECORD.size + self._token_bytes
        self._memory: mmap.mmap | bytes = b""

    def open(self, folder: OpenFolder, slots: int) -> None:
        """Open the file in the engine's folder, with the records that the engine before has left.

        If the file cannot be used, adopted blocks are announced with their first use.
        """
        try:
            descriptor = self._prepared(folder)
            try:
                os.posix_fallocate(descriptor, 0, PAGE + slots * self._pitch)
                self._memory = mmap.mmap(descriptor, PAGE + slots * self._pitch)
            finally:
                os.close(descriptor)
        except (OSError, DiskError) as error:
            _say_failed(error)

    def write(self, slot: SlotId, key: BlockKey, note: KeptNote) -> None:
        """Keep the note of the block in a slot, if there is a place for it."""
        start = PAGE + slot * self._pitch
        if isinstance(self._memory, mmap.mmap) and (record := self._packed(key, note)):
            self._memory[start : start + self._pitch] = record

    def read(self, slot: SlotId, key: BlockKey, tokens: int) -> KeptNote | None:
        """Return the note of the block in a slot, which has this many tokens; None if there is none."""
        start = PAGE + slot * self._pitch
        record = self._memory[start : start + self._pitch]
        if len(record) < self._pitch:
            return None
        check, depth, length, parent = _RECORD.unpack_from(record)
        if check != xxh3_64_intdigest(key + record[8:]):
            return None
        end = _RECORD.size + 4 * tokens
        return KeptNote(depth, parent[:length] if length else None, record[_RECORD.size : end])

    def depth(self, slot: SlotId) -> int:
        """Return how deep the block of a slot's note is in its prompt; any number if the slot has no note."""
        start = PAGE + slot * self._pitch + 8
        return int.from_bytes(self._memory[start : start + 4], "little")

    def announced(self) -> None:
        """Release what is only needed until all blocks of the engine before are announced."""

    def _prepared(self, folder: OpenFolder) -> int:
        """Return a descriptor of the file, emptied if it has another format, with a header."""
        header = _HEADER.pack(_MAGIC, _VERSION, self._token_bytes)
        descriptor = folder.open(_NAME, os.O_RDWR | os.O_CREAT)
        try:
            if os.pread(descriptor, len(header), 0) != header:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, header.ljust(PAGE, b"\0"), 0)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _packed(self, key: BlockKey, note: KeptNote) -> bytes:
        """Return a note's record; empty if the parent's hash is too long for it."""
        parent = note.parent or b""
        if len(parent) > _PARENT_BYTES:
            return b""
        tokens = note.tokens.ljust(self._token_bytes, b"\0")
        body = _RECORD.pack(0, note.depth, len(parent), parent)[8:] + tokens
        return xxh3_64_intdigest(key + body).to_bytes(8, "little") + body


class DiskNotes(KeptNotes):
    """The notes beside the disk's index. The engine's thread never waits for the disk: `open` and `flush` run on another."""

    def __init__(self, block_tokens: int) -> None:
        super().__init__(block_tokens)
        self._unwritten: list[tuple[int, bytes]] = []
        self._has_failed = False

    def open(self, folder: OpenFolder, slots: int) -> None:
        try:
            with os.fdopen(self._prepared(folder), "rb") as file:
                if os.fstat(file.fileno()).st_size <= _MOST_READ:
                    self._memory = file.read()
        except (OSError, DiskError) as error:
            _say_failed(error)

    def write(self, slot: SlotId, key: BlockKey, note: KeptNote) -> None:
        if len(self._unwritten) < _MOST_UNWRITTEN and (record := self._packed(key, note)):
            self._unwritten.append((PAGE + slot * self._pitch, record))

    def flush(self, folder: OpenFolder) -> None:
        """Write the records to the file. If that fails, write no more: the disk may still take blocks."""
        unwritten, self._unwritten = self._unwritten, []
        if not unwritten or self._has_failed:
            return
        try:
            with os.fdopen(folder.open(_NAME, os.O_RDWR | os.O_CREAT), "r+b") as file:
                for start, record in unwritten:
                    os.pwrite(file.fileno(), record, start)
        except (OSError, DiskError) as error:
            self._has_failed = True
            _say_failed(error)

    def announced(self) -> None:
        self._memory = b""


def _say_failed(error: Exception) -> None:
    note = "blocks of the engine before are announced with their first use"
    log.warning("kept_notes_failed", reason=str(error), note=note)
