"""Fakes with which tests of kvoffload control time, copies and device memory.

clock = FakeClock()                        await clock.advance(0.01)
copier = GatedCopier()                     copier.tickets[0].finish()   .fail()   .tear()   .corrupt()
device = FakeDevice(8, pages=[64, 32])     device.layout, device.read(3)
"""

from kvoffload.testing.clock import FakeClock, wait_all_blocked
from kvoffload.testing.copier import GatedCopier, GatedTicket
from kvoffload.testing.device import FakeDevice

__all__ = ["FakeClock", "FakeDevice", "GatedCopier", "GatedTicket", "wait_all_blocked"]
