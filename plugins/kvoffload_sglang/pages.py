"""Finds the memory regions of the pages in SGLang's host pools.

In layer-first layouts, each layer of a page has a region for keys and a region for values. In page-first layouts, one
region contains all layers of a page.
"""

from __future__ import annotations

from ctypes import c_char
from typing import TYPE_CHECKING

import torch

from kvoffload.model.errors import ConfigError

if TYPE_CHECKING:
    from sglang.srt.mem_cache.pool_host import HostKVCache

    from kvoffload.tier_cache import Page


class HostPages:
    """Finds the memory of a host pool's pages.

    Args:
        pool: the host pool.
        name: SGLang's name for the pool.

    Attributes:
        pool: the host pool.
        page_tokens: the number of token positions in a page.
        page_bytes: the size of each of a page's memory regions, in bytes.

    Raises:
        ConfigError: the pool does not return the addresses of its pages.
    """

    def __init__(self, pool: HostKVCache, name: str) -> None:
        self.pool = pool
        self.page_tokens: int = pool.page_size
        try:
            _, sizes = pool.get_page_buffer_meta(torch.arange(self.page_tokens))
        except Exception as error:  # a pool without addresses may raise any exception
            layout = getattr(pool, "layout", None)
            problem = f"SGLang's {name} pool in the layout {layout!r} has no addresses for storage: {error!r}"
            raise ConfigError([problem]) from error
        self.page_bytes = tuple(sizes)

    def at(self, host_indices: torch.Tensor) -> list[Page]:
        """Return the pages at the given token positions in the pool.

        Args:
            host_indices: `page_tokens` positions for each page, of any number of pages.
        """
        addresses, sizes = self.pool.get_page_buffer_meta(host_indices)
        regions = [
            memoryview((c_char * size).from_address(address)).cast("B")
            for address, size in zip(addresses, sizes, strict=True)
        ]
        count = len(self.page_bytes)
        return [regions[first : first + count] for first in range(0, len(regions), count)]
