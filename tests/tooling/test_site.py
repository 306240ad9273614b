from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

from tests.tooling.scripts import ROOT

BUILD = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
WIDTHS = (390, 1024, 1280, 1440)
WIDTH_OF_TABLES = 1024
CUT_OFF = """[...document.querySelectorAll('.table-wrapper')].map(
    one => one.scrollWidth - one.clientWidth).filter(pixels => pixels > 0)"""
"""By how many pixels each table is cut off that one must scroll to read."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [*BUILD, "-c", str(ROOT / "docs"), str(ROOT), str(folder)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_site_builds_without_a_warning(site: Path) -> None:
    assert "docs/index.html" in (site / "index.html").read_text(encoding="utf-8")
    listed = (site / "docs" / "index.html").read_text(encoding="utf-8")
    for page in ("install", "configure", "comparison", "plugins"):
        assert f'href="{page}.html"' in listed


def test_the_first_page_says_of_every_page_what_it_is_for() -> None:
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\* \[[^\]]+\]\((\S+)\.md\): \S.*\.$", text, re.MULTILINE)
    entries = [
        line
        for block in re.findall(r"```\{toctree\}\n(.*?)```", text, re.DOTALL)
        for line in block.splitlines()
    ]
    pages = [line.rpartition("<")[2].rstrip(">") for line in entries if line and not line.startswith(":")]
    assert listed == pages


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.tools("chromium-headless-shell")
def test_no_page_is_wider_than_its_window_and_no_table_is_cut_off(site: Path) -> None:
    # the index page only redirects
    pages = [path for path in site.rglob("*.html") if path != site / "index.html"]
    too_wide: list[tuple[str, int, int]] = []
    cut_off: list[tuple[str, int, int]] = []
    with sync_playwright() as playwright:
        program = shutil.which("chromium-headless-shell")
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page()
        for path in pages:
            page.goto(path.as_uri())
            for width in WIDTHS:
                page.set_viewport_size({"width": width, "height": 900})
                found = page.evaluate("document.documentElement.scrollWidth")
                if found > width:
                    too_wide.append((path.name, width, found))
                if width >= WIDTH_OF_TABLES:
                    cut_off += ((path.name, width, by) for by in page.evaluate(CUT_OFF))
        browser.close()
    assert len(pages) > 20
    assert not too_wide
    assert not cut_off
