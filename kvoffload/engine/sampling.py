"""From logits to tokens: greedy, or by temperature with a generator of the request's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvoffload.engine.request import Request, Token


class Sampler:
    """Keeps the generators of requests that sample, so that neither batching nor preemption changes their draws."""

    def __init__(self) -> None:
        self._generators: dict[str, torch.Generator] = {}

    def sample(self, requests: Sequence[Request], logits: torch.Tensor) -> list[Token]:
        """One token per request from logits [requests, vocab_size], with its log-probability."""
        if not requests:
            return []
        logprobs = logits.log_softmax(dim=-1)
        chosen = logprobs.argmax(dim=-1)
        for row, request in enumerate(requests):
            if request.params.temperature > 0:
                chosen[row] = self._draw(request, logits[row])
        picked = logprobs.gather(1, chosen[:, None])[:, 0]
        return [Token(*pair) for pair in zip(chosen.tolist(), picked.tolist(), strict=True)]

    def forget(self, request: Request) -> None:
        """Drop the generator of a request that has ended."""
        self._generators.pop(request.request_id, None)

    def _draw(self, request: Request, logits: torch.Tensor) -> int:
        generator = self._generators.get(request.request_id)
        if generator is None:
            # On the CPU, so that a request draws the same on every device.
            generator = self._generators[request.request_id] = torch.Generator().manual_seed(
                request.params.seed
            )
        weights = (logits.cpu() / request.params.temperature).softmax(dim=-1)
        return int(torch.multinomial(weights, 1, generator=generator).item())
