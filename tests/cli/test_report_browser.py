"""The page of `kvoffload report` in a real browser, as somebody reads it: on a phone, in the dark, by keyboard."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import sync_playwright

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.slow, pytest.mark.tools("chromium-headless-shell")]

# Long enough that the host has memory before it is over, on a busy machine too.
_DEMO = (
    "demo --model tiny --conversations 6 --turns 4 --first-tokens 400 --turn-tokens 30 --answer-tokens 5 "
    "--device-blocks 80 --host-bytes 8MiB"
)
_FOCUSED = "document.activeElement.closest('figure, section')?.id || document.activeElement.tagName"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A demo's page and its journal's."""
    folder = tmp_path_factory.mktemp("run")
    demo, journal = folder / "demo.html", folder / "journal.jsonl"
    command = [sys.executable, "-m", "kvoffload.cli"]
    options = ["--report", str(demo), "--config", f"journal_path={journal}"]
    # In processes of their own: the browser's library runs an event loop in this one.
    subprocess.run([*command, *_DEMO.split(), *options], check=True, capture_output=True)
    subprocess.run([*command, "report", str(journal)], check=True, capture_output=True)
    return [demo, folder / "journal.jsonl.html"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        program = shutil.which("chromium-headless-shell")
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


def test_nothing_is_asked_of_the_network_and_nothing_goes_wrong(browser: Browser, pages: list[Path]) -> None:
    for path in pages:
        page = browser.new_page()
        requests, wrong = _watch(page)
        page.goto(path.as_uri(), wait_until="networkidle")
        assert requests == [path.as_uri()]
        assert not wrong


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_no_width_makes_the_page_scroll_sideways(width: int, browser: Browser, pages: list[Path]) -> None:
    for path in pages:
        page = browser.new_page(viewport={"width": width, "height": 700})
        page.goto(path.as_uri())
        page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        sizes = page.evaluate("[...document.querySelectorAll('.plot>svg')].map(s => s.clientWidth)")
        assert sizes
        assert min(sizes) > 0.6 * min(width, 400)


def test_light_and_dark_follow_the_reader_and_can_be_read(browser: Browser, pages: list[Path]) -> None:
    grounds = []
    for scheme in ("light", "dark"):
        page = browser.new_page(color_scheme=scheme)
        page.goto(pages[0].as_uri())
        ground = _colour(page.evaluate("getComputedStyle(document.querySelector('figure')).backgroundColor"))
        for element in ("h1", "figure p", ".verdict", ".y b", "td"):
            ink = _colour(page.evaluate(f"getComputedStyle(document.querySelector('{element}')).color"))
            assert _contrast(ink, ground) >= 4.5, (scheme, element)
        grounds.append(ground)
    assert sum(grounds[0]) > 600
    assert sum(grounds[1]) < 200


def test_tab_reaches_every_plot_and_its_numbers_and_shows_where_it_is(
    browser: Browser, pages: list[Path]
) -> None:
    for path in pages:
        page = browser.new_page()
        page.goto(path.as_uri())
        plots = page.evaluate("[...document.querySelectorAll('figure')].map(one => one.id)")
        page.keyboard.press("Tab")
        reached, opened = [], 0
        for _ in range(40):
            on = page.evaluate("document.activeElement.tagName")
            if on == "BODY":
                break
            if on == "FIGURE":
                reached.append(page.evaluate(_FOCUSED))
                assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
            if on == "SUMMARY":
                page.keyboard.press("Enter")
                assert page.evaluate("document.activeElement.parentElement.open")
                opened += 1
            page.keyboard.press("Tab")
        assert reached == plots
        assert opened == page.evaluate("document.querySelectorAll('details').length") > 0


def test_every_plot_says_what_it_shows(browser: Browser, pages: list[Path]) -> None:
    page = browser.new_page()
    page.goto(pages[0].as_uri())
    for name in (
        "Time to first token, with and without",
        "Hit ratio by tier",
        "Host slots by state",
        "Transfers",
    ):
        image = page.get_by_role("img", name=name)
        assert image.count() == 1
        assert image.locator("desc").text_content()


def _watch(page: Page) -> tuple[list[str], list[str]]:
    requests: list[str] = []
    wrong: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    return requests, wrong


def _colour(text: str) -> list[int]:
    return [int(part) for part in text[text.index("(") + 1 : -1].split(",")[:3]]


def _contrast(one: list[int], other: list[int]) -> float:
    """WCAG 2's contrast ratio."""
    dark, light = sorted((_luminance(one), _luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: list[int]) -> float:
    parts = [part / 255 for part in colour]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
