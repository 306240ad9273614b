from __future__ import annotations

import re

import pytest

from tests.tooling.scripts import ROOT

ROWS = re.findall(r"^\| .* \| `(\S+)::(\w+)` \|$", (ROOT / "tests/cuda_emulator/README.md").read_text(), re.M)


def test_the_list_of_gpu_faults_is_not_empty() -> None:
    assert len(ROWS) > 30


@pytest.mark.parametrize(("file", "name"), ROWS)
def test_the_test_of_each_gpu_fault_exists(file: str, name: str) -> None:
    assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.M)
