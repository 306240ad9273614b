"""A client for a server. It streams completions, measures the time to first token, and reads metrics."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import TYPE_CHECKING, Any

from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from tests.vllm.stock.engines import Answer, Server

_DATA, _END = b"data: ", b"[DONE]"
_THEIRS = frozenset({"engine", "model_name"})  # every series of a server has these labels
_TIMEOUT_S = 180


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to one prompt.

    Args:
        tokens, logprobs: the answer's tokens and their log-probabilities.
        prompt_tokens: the number of tokens in the prompt.
        cached_tokens: the number of prompt tokens that vLLM reports as not computed.
        first_token_s: the time in seconds from sending the prompt to the first token.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int
    first_token_s: float

    def agrees_with(self, other: Reply | Answer, limit: float = 1e-3) -> bool:
        """Return whether both answers have the same tokens, and log-probabilities that differ by at most `limit`."""
        if self.tokens != other.tokens or len(self.logprobs) != len(other.logprobs):
            return False
        return all(abs(one - two) <= limit for one, two in zip(self.logprobs, other.logprobs, strict=True))


def stream(
    server: Server,
    prompt: Sequence[int],
    count: int,
    began: Callable[[], object] = lambda: None,
    salt: str | None = None,
) -> Reply:
    """Stream a greedy completion of `count` tokens; return it. Call `began` at the first token.

    A prompt with a salt finds only blocks that were computed with the same salt.

    Raises:
        OSError: the server does not answer, or stops before the end of its answer.
    """
    tokens: list[int] = []
    logprobs: list[float] = []
    first, usage = 0.0, dict[str, Any]()
    begun = time.perf_counter()
    for event in _events(server, _body(prompt, count) | ({"cache_salt": salt} if salt else {})):
        for choice in event["choices"]:
            if not tokens:
                first = time.perf_counter() - begun
                began()
            tokens += choice["token_ids"]
            logprobs += choice["logprobs"]["token_logprobs"]
        usage = event.get("usage") or usage
    if not usage:
        raise ConnectionError("the answer was cut off")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Reply(tuple(tokens), tuple(logprobs), usage["prompt_tokens"], cached, first)


class Metrics:
    """The metrics of one scrape, without the labels that every series has."""

    def __init__(self, text: str) -> None:
        self.series: dict[tuple[str, tuple[str, ...]], float] = {}
        self.written: dict[tuple[str, tuple[str, ...]], str] = {}  # as `/metrics` writes each series
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = {name: value for name, value in sample.labels.items() if name not in _THEIRS}
                key = sample.name, tuple(labels.values())
                reported = ",".join(f'{name}="{value}"' for name, value in labels.items())
                self.series[key] = self.series.get(key, 0.0) + sample.value
                self.written[key] = f"{sample.name}{{{reported}}}" if reported else sample.name

    def __call__(self, name: str, *labels: str) -> int:
        """Return the sum of the series with this name and these label values, as a whole number."""
        return int(self.exact(name, *labels))

    def exact(self, name: str, *labels: str) -> float:
        """Return the sum of the series with this name and these label values."""
        series = self.series.items()
        return sum(value for (at, values), value in series if at == name and set(labels) <= set(values))


def scrape(server: Server) -> Metrics:
    return Metrics(server.get("/metrics"))


def settled(server: Server) -> Metrics:
    """Wait until no request runs and no copy is open. Return the metrics."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        seen = scrape(server)
        running = seen("vllm:num_requests_running") + seen("vllm:num_requests_waiting")
        offered, outcomes = seen("kvoffload_offered_blocks_total"), seen("kvoffload_store_blocks_total")
        if not running and not seen("kvoffload_open_jobs") and offered == outcomes:
            return seen
        time.sleep(0.05)
    raise TimeoutError("the server is still busy")


def _body(prompt: Sequence[int], count: int) -> dict[str, object]:
    return {
        "model": "small",
        "prompt": list(prompt),
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _events(server: Server, body: dict[str, object]) -> Iterator[dict[str, Any]]:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(server.root + "/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
        for line in _lines(answer):
            event = json.loads(line)
            if "error" in event:
                raise ConnectionError(str(event["error"]))
            yield event


def _lines(answer: HTTPResponse) -> Iterator[bytes]:
    try:
        for line in answer:
            data = line.removeprefix(_DATA).strip()
            if line.startswith(_DATA) and data != _END:
                yield data
    except HTTPException as cut:
        raise ConnectionError("the answer was cut off") from cut
