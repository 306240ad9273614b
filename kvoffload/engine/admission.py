"""Which requests are accepted; a request that cannot be served is refused at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvoffload.engine.errors import PromptTooLong, RequestRefused
from kvoffload.engine.keys import KeyChain
from kvoffload.engine.request import Request, RequestStats

if TYPE_CHECKING:
    from kvoffload.engine.capacity import Capacity
    from kvoffload.engine.config import EngineConfig, SamplingParams


class Admission:
    """Checks prompts against the model's length, its vocabulary and the pool, and makes requests of them."""

    def __init__(self, config: EngineConfig, capacity: Capacity, usable_blocks: int) -> None:
        self._config = config
        self._capacity = capacity
        self._usable_blocks = usable_blocks

    def make_request(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        cache_salt: bytes,
        now_s: float,
        trace_parent: str | None = None,
    ) -> Request:
        """A request that can be served.

        Raises:
            RequestRefused: the prompt is empty or has unknown tokens, or is too long for the model or the pool.
        """
        self._check_tokens(prompt)
        tokens = len(prompt) + params.max_new_tokens
        if tokens > self._config.max_model_len:
            raise PromptTooLong(len(prompt), params.max_new_tokens, self._config.max_model_len)
        groups = len(self._capacity.groups)
        chain = KeyChain(self._config.block_tokens, groups, cache_salt)
        stats = RequestStats(len(prompt), arrived_s=now_s)
        request = Request(request_id, list(prompt), len(prompt), params, chain, stats, groups, trace_parent)
        self._capacity.check_fits(request.max_kv_tokens, self._usable_blocks)
        return request

    def _check_tokens(self, prompt: Sequence[int]) -> None:
        if not prompt:
            raise RequestRefused("the prompt is empty: there is nothing to continue")
        size = self._config.model.vocab_size
        if wrong := next((token for token in prompt if not 0 <= token < size), None):
            raise RequestRefused(f"token {wrong} is not in the vocabulary of {size} tokens")
