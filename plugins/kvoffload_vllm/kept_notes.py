"""Keeps the data of KV cache events beside host memory in files, so that the next engine can announce what it adopts.

    | header: magic, version, tokens of a block | record of each host slot: check, depth, length of parent, parent, tokens |

A record counts if its check fits the slot's key, so a record of an earlier block of the slot is harmless. Blocks of
adapters, and blocks whose hash covers more than tokens, get no record: they are announced with their first use.

The file has the tokens of prompts, readable for this user only. It is written only while vLLM publishes events.
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
    """The notes of the blocks in one engine's host slots. `open` may run on any thread, everything else on the engine's.

    Args:
        block_tokens: the largest number of tokens in a block.
    """

    def __init__(self, block_tokens: int) -> None:
        self._token_bytes = 4 * block_tokens
        self._pitch = _RECORD.size + self._token_bytes
        self._memory: mmap.mmap | None = None

    def open(self, folder: OpenFolder, slots: int) -> None:
        """Open the file in the engine's folder, with the records that the engine before has left.

        If the file cannot be used, adopted blocks are announced with their first use.
        """
        try:
            self._memory = self._mapped(folder, slots)
        except (OSError, DiskError) as error:
            log.warning(
                "kept_notes_failed",
                reason=str(error),
                note="adopted blocks are announced with their first use",
            )

    def _mapped(self, folder: OpenFolder, slots: int) -> mmap.mmap:
        header = _HEADER.pack(_MAGIC, _VERSION, self._token_bytes)
        descriptor = folder.open(_NAME, os.O_RDWR | os.O_CREAT)
        try:
            if os.pread(descriptor, len(header), 0) != header:
                os.ftruncate(descriptor, 0)
            os.posix_fallocate(descriptor, 0, PAGE + slots * self._pitch)
            os.pwrite(descriptor, header, 0)
            return mmap.mmap(descriptor, PAGE + slots * self._pitch)
        finally:
            os.close(descriptor)

    def write(self, slot: SlotId, key: BlockKey, note: KeptNote) -> None:
        """Keep the note of the block in a slot. Without an open file, do nothing."""
        parent = note.parent or b""
        if self._memory is None or len(parent) > _PARENT_BYTES:
            return
        start = PAGE + slot * self._pitch
        tokens = note.tokens.ljust(self._token_bytes, b"\0")
        body = _RECORD.pack(0, note.depth, len(parent), parent)[8:] + tokens
        self._memory[start : start + self._pitch] = xxh3_64_intdigest(key + body).to_bytes(8, "little") + body

    def read(self, slot: SlotId, key: BlockKey, tokens: int) -> KeptNote | None:
        """Return the note of the block in a slot, which has this many tokens; None if there is none."""
        if self._memory is None:
            return None
        start = PAGE + slot * self._pitch
        record = self._memory[start : start + self._pitch]
        check, depth, length, parent = _RECORD.unpack_from(record)
        if len(record) < self._pitch or check != xxh3_64_intdigest(key + record[8:]):
            return None
        end = _RECORD.size + 4 * tokens
        return KeptNote(depth, parent[:length] if length else None, record[_RECORD.size : end])

    def depth(self, slot: SlotId) -> int:
        """Return how deep the block of a slot's note is in its prompt; any number if the slot has no note."""
        if self._memory is None:
            return 0
        start = PAGE + slot * self._pitch + 8
        return int.from_bytes(self._memory[start : start + 4], "little")
