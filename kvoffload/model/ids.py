"""Types of ids. Functions of other packages take and return these types, never a bare int or bytes."""

from __future__ import annotations

from typing import NewType

RequestId = NewType("RequestId", str)
GroupId = NewType("GroupId", int)
DeviceBlockId = NewType("DeviceBlockId", int)
SlotId = NewType("SlotId", int)
JobId = NewType("JobId", int)
Rank = NewType("Rank", int)

BlockKey = NewType("BlockKey", bytes)
"""The engine's block hash followed by the group's number, four bytes, big endian.

The hash covers the parent block, LoRA, multimodal input and cache salt, so two tenants never share a key.
"""

NULL_BLOCK = DeviceBlockId(0)
"""Marks a position without a block in a block table: the engine freed the block, or the core cleared the position."""
