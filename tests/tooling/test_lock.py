import re
import tomllib
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.tooling.scripts import ROOT, load_script

lock_script = load_script("lock")
LOCK = (ROOT / ".ci" / "requirements.lock").read_text()


@pytest.fixture
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_lock_is_current(pyproject: dict[str, Any]) -> None:
    assert lock_script.is_current(lock_script.requirements(pyproject), LOCK), "stale: make lock"


def test_every_line_is_an_exact_pin_and_names_no_index() -> None:
    lines = [line for line in LOCK.splitlines() if not line.startswith("#")]
    assert lines
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9.-]+==[A-Za-z0-9.!]+", line)] == []
    assert "://" not in LOCK


def test_the_pins_satisfy_every_requirement(pyproject: dict[str, Any]) -> None:
    pins = dict(line.split("==") for line in LOCK.splitlines() if not line.startswith("#"))
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    for line in lock_script.requirements(pyproject):
        wanted = Requirement(line)
        assert pins[canonicalize_name(wanted.name)] in wanted.specifier, line
