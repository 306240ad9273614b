from __future__ import annotations

import subprocess
import sys

import pytest

from kvoffload.model.errors import EngineContractError
from kvoffload.testing import FakeClock
from kvoffload.transfer.factory import make_allocator, make_copier
from kvoffload.transfer.layout import DeviceLayout, DeviceRegion
from tests.gates import ManualExecutor


def test_another_kind_of_device_is_refused() -> None:
    layout = DeviceLayout((DeviceRegion(4096, 64, 64, 2, "xpu:0"),))
    with pytest.raises(EngineContractError, match="'xpu:0'"):
        make_copier(layout, threads=ManualExecutor(), clock=FakeClock())
    with pytest.raises(EngineContractError, match="'xpu:0'"):
        make_allocator(layout, executor=ManualExecutor())


def test_torch_is_not_imported_for_the_cpu() -> None:
    modules = "factory, pump, arena, host_copier, layout"
    code = (
        f"import sys; from kvoffload.transfer import {modules}; import kvoffload.transfer.cuda.copier; "
        "import kvoffload.testing, kvoffload.runtime.portal; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
