"""Fakes for tests with kvoffload: time, copies and threads under the test's control.

clock = FakeClock()                        await clock.advance(0.01)
copier = GatedCopier()                     copier.tickets[0].finish()   .fail()   .tear()   .corrupt()
executor = ManualExecutor()                executor.run_next()
gate = ThreadGate()                        gate.arrive(), gate.wait_for_arrivals(2), gate.open()
device = FakeDevice(8, pages=[64, 32])     device.layout, device.read(3)
"""

from kvoffload.testing.clock import FakeClock, wait_all_blocked
from kvoffload.testing.copier import GatedCopier, GatedTicket
from kvoffload.testing.device import FakeDevice
from kvoffload.testing.gates import ManualExecutor, ThreadGate
from kvoffload.testing.logs import capture_logs

__all__ = [
    "FakeClock",
    "FakeDevice",
    "GatedCopier",
    "GatedTicket",
    "ManualExecutor",
    "ThreadGate",
    "capture_logs",
    "wait_all_blocked",
]
