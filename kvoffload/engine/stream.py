"""The caller's end of a request: an asynchronous iterator over its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from kvoffload.engine.request import RequestStats, Token


class TokenStream:
    """Tokens of one request as they are computed.

    Iterate with `async for`. The request is aborted by `aclose`, by leaving an `async with` block over the stream, or
    by cancelling a task that waits for the next token. Tokens that arrived before are then gone.
    """

    def __init__(self, request_id: str, stats: RequestStats, abort: Callable[[str], None]) -> None:
        self.request_id = request_id
        self.stats = stats
        self._abort = abort
        self._arrived: asyncio.Queue[Token | BaseException] = asyncio.Queue()
        self._is_closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Token:
        """The next token.

        Raises:
            StopAsyncIteration: the request is complete or aborted.
            EngineError: the engine could not serve the request to its end.
        """
        if self._is_closed:
            raise StopAsyncIteration
        try:
            item = await self._arrived.get()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if isinstance(item, BaseException):
            self._is_closed = True
            raise item
        return item

    async def aclose(self) -> None:
        """Abort the request if it is still open."""
        self._is_closed = True
        self._abort(self.request_id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def push(self, token: Token) -> None:
        """Called by the engine with each new token."""
        self._arrived.put_nowait(token)

    def finish(self, error: BaseException | None = None) -> None:
        """Called by the engine after the last token, or with the reason why there will be no more."""
        self._arrived.put_nowait(error or StopAsyncIteration())
