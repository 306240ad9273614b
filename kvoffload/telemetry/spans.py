"""Sends an engine's timeline to a collector as OpenTelemetry spans.

The engine's thread puts messages into a feed. Another thread makes spans from the messages and sends the spans. If the
collector does not answer, the feed fills up, and further messages are dropped and counted, so the engine does not wait.
After dropped messages, every open span ends as "unfinished", because the dropped messages may include its end.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from kvoffload.bus.bus import Bus
from kvoffload.bus.feed import Feed
from kvoffload.bus.guard import call_guarded
from kvoffload.model import events, facts
from kvoffload.model.config import OffloadConfig
from kvoffload.model.engine import EngineShape
from kvoffload.model.errors import ConfigError
from kvoffload.telemetry.records import Record, summary_of
from kvoffload.telemetry.timeline import Timeline

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

NAME = "spans"
_BATCH = 512
_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_PACKAGES = {"http/protobuf": "http", "grpc": "grpc"}
"""For each protocol, the name of the exporter's package."""
_FACTS = (facts.RequestSeen, facts.BlocksAllocated, facts.StepScheduled, facts.RequestEnded)


class Entry(NamedTuple):
    """A message in the feed.

    Args:
        sequence: the message's number. Missing numbers belong to dropped messages.
        time: the time in unix seconds.
        message: the fact or event.
    """

    sequence: int
    time: float
    message: object


class SpanObserver:
    """Sends the spans of one engine.

    Args:
        exporter: sends the spans. `run` shuts the exporter down at its end.
        about: attributes that describe the engine.
        now: returns the time in unix seconds.
    """

    def __init__(self, exporter: SpanExporter, about: dict[str, str | int], now: Callable[[], float]) -> None:
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        from kvoffload.telemetry import otel

        self._exporter = exporter
        self._now = now
        self._offered = 0
        self._ended = InMemorySpanExporter()
        self._canvas = otel.SpanCanvas(otel.make_tracer(about, self._ended))
        self._timeline = Timeline(self._canvas)
        self._feed: Feed[Entry] | None = None
        self._on_failure: Callable[[], object] | None = None

    def subscribe(self, bus: Bus, on_failure: Callable[[], object], capacity: int = 4096) -> None:
        """Start to receive the engine's messages.

        Args:
            bus: the engine's bus.
            on_failure: called on the executor's thread for each batch of spans that the collector did not accept.
            capacity: the maximum number of messages in the feed. Further messages are dropped.
        """
        self._on_failure = on_failure
        self._feed = bus.observe(NAME, capacity)
        spanned: tuple[type, ...] = (*_FACTS, *self._timeline.on_event)
        for cls in spanned:
            bus.count(cls, self._offer)

    async def run(self, executor: Executor, on_removed: Callable[[str, Exception], object]) -> None:
        """Make and send spans until the bus is closed, or until the exporter raises an exception.

        Args:
            executor: runs the exporter, which may block a thread.
            on_removed: called with the observer's name and the exporter's exception.
        """
        assert self._feed is not None, "subscribe() comes first"
        loop = asyncio.get_running_loop()
        try:
            while batch := await self._feed.take(_BATCH):
                await loop.run_in_executor(executor, self._draw, batch)
            await loop.run_in_executor(executor, self._close)
        except Exception as exc:
            call_guarded(on_removed, NAME, exc)
        finally:
            self._feed.abandon()
            with suppress(RuntimeError):  # raised if the portal has already shut the executor down
                executor.submit(self._exporter.shutdown)

    # -- on the engine's thread -------------------------------------------------------------------------------------

    def _offer(self, message: object) -> None:
        assert self._feed is not None
        if isinstance(message, facts.StepScheduled) and not message.preempted:
            return
        self._offered += 1
        self._feed.offer(Entry(self._offered, self._now(), message))

    # -- on the executor's thread -----------------------------------------------------------------------------------

    def _draw(self, batch: Iterable[Entry]) -> None:
        for entry in batch:
            if entry.sequence > self._timeline.sequence + 1:
                self._timeline.close()
                self._timeline = Timeline(self._canvas)
            message = entry.message
            self._canvas.trace_parent = (
                message.trace_parent if isinstance(message, facts.RequestSeen) else None
            )
            drawn = message if isinstance(message, events.Event) else summary_of(message)
            self._timeline.draw(Record(entry.sequence, entry.time, drawn))
        self._send()

    def _close(self) -> None:
        self._timeline.close()
        self._send()

    def _send(self) -> None:
        spans = self._ended.get_finished_spans()
        self._ended.clear()
        if spans and self._exporter.export(spans).name != "SUCCESS" and self._on_failure is not None:
            self._on_failure()


def endpoint_of(config: OffloadConfig) -> str | None:
    """Return the collector's URL from `otlp_endpoint` or, without this setting, from the environment.

    The environment variable may be meant for other programs, so it counts only if the extra `otel` is installed.
    """
    if config.otlp_endpoint is not None or not (named := os.environ.get(_VARIABLE)):
        return config.otlp_endpoint
    try:
        import_module("kvoffload.telemetry.otel")
    except ModuleNotFoundError:
        return None
    return named


def make_spans(config: OffloadConfig, shape: EngineShape, now: Callable[[], float]) -> SpanObserver | None:
    """Return the observer that sends spans; None if no collector is configured.

    Raises:
        ConfigError: the extra `otel` is not installed, or an environment variable names an unknown protocol.
    """
    if (endpoint := endpoint_of(config)) is None:
        return None
    about: dict[str, str | int] = {
        "kvoffload.ranks": shape.ranks,
        "kvoffload.device_blocks": shape.device_blocks,
        "kvoffload.host_bytes": config.host_bytes,
        "kvoffload.store_policy": config.store_policy,
    }
    return SpanObserver(make_exporter(endpoint), about, now)


def make_exporter(endpoint: str) -> SpanExporter:
    """Return an exporter to the collector at a URL. The exporter does not connect before it has spans to send.

    The protocol comes from OTEL_EXPORTER_OTLP_TRACES_PROTOCOL or OTEL_EXPORTER_OTLP_PROTOCOL. Headers, timeouts,
    compression and certificates also come from environment variables.

    Raises:
        ConfigError: the extra `otel` is not installed, or an environment variable names an unknown protocol.
    """
    named = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL"
    )
    protocol = named or "http/protobuf"
    try:
        import_module("kvoffload.telemetry.otel")
        if protocol not in _PACKAGES:
            problem = (
                f"the environment asks for the OTLP protocol {protocol!r}; known: {', '.join(_PACKAGES)}"
            )
            raise ConfigError([problem])
        package = import_module(f"opentelemetry.exporter.otlp.proto.{_PACKAGES[protocol]}.trace_exporter")
    except ModuleNotFoundError as error:
        problem = (
            f"otlp_endpoint or {_VARIABLE} names a collector of spans, but {error.name} is not installed: "
            "pip install 'kvoffload[otel]'"
        )
        raise ConfigError([problem]) from error
    exporter: SpanExporter = package.OTLPSpanExporter(endpoint=endpoint)
    return exporter


def check_exporter(config: OffloadConfig) -> None:
    """If the settings or the environment name a collector, check that kvoffload can create an exporter.

    Raises:
        ConfigError: the extra `otel` is not installed, or an environment variable names an unknown protocol.
    """
    if (endpoint := endpoint_of(config)) is not None:
        make_exporter(endpoint).shutdown()
