"""The page of `kvoffload report` in a real browser: on a phone, in dark mode, and by keyboard."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from PIL import Image
from playwright.sync_api import sync_playwright

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.slow, pytest.mark.tools("chromium-headless-shell")]

# Long enough that host memory is ready before the end, even on a busy machine.
_DEMO = (
    "demo --model tiny --conversations 6 --turns 4 --first-tokens 400 --turn-tokens 30 --answer-tokens 5 "
    "--device-blocks 80 --host-bytes 8MiB"
)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the address of a page."""
    journal = tmp_path_factory.mktemp("run") / "journal.jsonl"
    command = [sys.executable, "-m", "kvoffload"]
    # In separate processes, because the browser's library runs an event loop in this process.
    subprocess.run(
        [*command, *_DEMO.split(), "--config", f"journal_path={journal}"], check=True, capture_output=True
    )
    subprocess.run([*command, "report", str(journal)], check=True, capture_output=True)
    return journal.with_name("journal.jsonl.html").as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        program = shutil.which("chromium-headless-shell")
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


def test_nothing_is_asked_of_the_network_and_nothing_goes_wrong(browser: Browser, report: str) -> None:
    page = browser.new_page()
    requests, wrong = _watch(page)
    page.goto(report, wait_until="networkidle")
    assert requests == [report]
    assert not wrong


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_no_width_makes_the_page_scroll_sideways(width: int, browser: Browser, report: str) -> None:
    page = browser.new_page(viewport={"width": width, "height": 700})
    page.goto(report)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # A figure wider than a phone scrolls separately, so that its text stays readable.
    sizes = page.evaluate(
        "[...document.querySelectorAll('figure svg')].map(s => s.getBoundingClientRect().width)"
    )
    assert min(sizes) >= 576


def test_light_and_dark_follow_the_reader_and_can_be_read(browser: Browser, report: str) -> None:
    grounds = []
    for scheme in ("light", "dark"):
        page = browser.new_page(color_scheme=scheme)
        page.goto(report)
        for element in ("h1", "figure svg text"):
            pixels = Image.open(io.BytesIO(page.locator(element).first.screenshot())).convert("L").tobytes()
            darkest, lightest = _luminance(min(pixels)), _luminance(max(pixels))
            assert (lightest + 0.05) / (darkest + 0.05) >= 4.5, (scheme, element)  # WCAG 2's minimum contrast
        grounds.append(pixels[0])
    assert grounds[0] > 200
    assert grounds[1] < 70


def test_tab_reaches_every_figure(browser: Browser, report: str) -> None:
    page = browser.new_page()
    page.goto(report)
    figures = page.evaluate("document.querySelectorAll('figure').length")
    reached = 0
    for _ in range(figures + 1):
        page.keyboard.press("Tab")
        reached += page.evaluate("document.activeElement.tagName") == "FIGURE"
    assert reached == figures > 4


def test_every_figure_has_a_name(browser: Browser, report: str) -> None:
    page = browser.new_page()
    page.goto(report)
    for name in (
        "Time to first token, by what was found",
        "Host slots, by state",
        "Transfers with the host tier",
    ):
        assert page.get_by_role("img", name=name).count() == 1


def _watch(page: Page) -> tuple[list[str], list[str]]:
    requests: list[str] = []
    wrong: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    return requests, wrong


def _luminance(grey: int) -> float:
    part = grey / 255
    return part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
