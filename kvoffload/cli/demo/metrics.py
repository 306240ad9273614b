"""Metrics served while the demo runs. The port is taken first of all, so that a bad one stops the demo at its start."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

from prometheus_client import CollectorRegistry

from kvoffload.cli.demo.address import Address
from kvoffload.telemetry.exporter import KVOffloadCollector
from kvoffload.telemetry.server import MetricsServer, serve

if TYPE_CHECKING:
    from kvoffload.runtime.scheduler_side import SchedulerSide


class MetricsPage:
    """A page that is empty until there is something to show.

    Args:
        address: where it is served.

    Raises:
        ConfigError: the address cannot be used.
    """

    def __init__(self, address: Address) -> None:
        self._registry = CollectorRegistry()
        self._server: MetricsServer = serve(self._registry, address.host, address.port)

    @property
    def url(self) -> str:
        """Where it is."""
        return self._server.url

    def show(self, offload: SchedulerSide) -> None:
        """Serve one engine's numbers from now on."""
        self._registry.register(KVOffloadCollector(offload.counters, offload))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
