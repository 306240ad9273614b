from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tooling.pages import PAGES
from tests.tooling.scripts import ROOT


def test_the_generated_tables_are_current() -> None:
    done = subprocess.run([sys.executable, ".ci/readme.py", "--check"], cwd=ROOT, check=False)
    assert done.returncode == 0, "a generated table is stale: make docs"


def test_every_setting_is_documented() -> None:
    from kvoffload.model.config import ALIASES, SETTINGS

    text = (ROOT / "docs/configure.md").read_text(encoding="utf-8")
    missing = [name for name in (*SETTINGS, *ALIASES) if f"`{name}`" not in text]
    assert not missing


@pytest.mark.parametrize("page", ["README.md", "docs/configure.md"])
def test_the_pages_and_the_doctor_call_the_same_host_small(page: str) -> None:
    from kvoffload.transfer.host_memory import SMALL_HOST

    assert f"elow {SMALL_HOST} times" in (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_make_targets_named_on_a_page_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = r"(?:`|^)make ([a-z-]+)(?![a-z-]|NAME)"  # `bench-NAME` stands for many targets
    for target in re.findall(named, page.read_text(encoding="utf-8"), flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
