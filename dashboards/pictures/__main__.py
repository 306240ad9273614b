"""`make screenshot`: pictures of the dashboards and of a report in a browser, from real runs."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from dashboards.generate.boards import BOARDS
from dashboards.observe.prometheus import ObserveError
from dashboards.pictures.boards import shown, take_boards, take_vllm_boards

FOLDER = Path(__file__).parent
SHOWN = ("overview", "report")
TAKEN = FOLDER / "taken.json"
"""For each shown dashboard, a digest of what its picture shows."""
NAMES = (*(board.name for board in BOARDS), "report")
BROWSER = "chromium-headless-shell"
# These numbers are smaller than the defaults, so that the demo ends within about a minute. The host memory is slightly
# larger than the conversations need.
DEMO = "demo --conversations 8 --turns 4 --first-tokens 768 --host-bytes 64MiB"
WIDTH, HEIGHT, SCALE = 1100, 1285, 0.85  # the README is about that wide


def take_report(target: Path, browser: str) -> Path:
    """Run a demo and write the top of its journal's report, as a browser shows it."""
    with tempfile.TemporaryDirectory() as folder:
        journal, page = Path(folder) / "journal", Path(folder) / "report.html"
        command = [sys.executable, "-m", "kvoffload"]
        subprocess.run([*command, *DEMO.split(), "--config", f"journal_path={journal}"], check=True)
        subprocess.run([*command, "report", str(journal), "-o", str(page)], check=True)
        _take(page, target, browser)
    return target


def _take(page: Path, target: Path, browser: str) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(
            executable_path=browser, args=["--no-sandbox", "--disable-lcd-text"]
        )
        shown = running.new_page(
            viewport={"width": WIDTH, "height": HEIGHT}, device_scale_factor=SCALE, color_scheme="light"
        )
        shown.goto(page.as_uri())
        shown.screenshot(path=target)
        running.close()


def main() -> int:
    """Take the named pictures, or by default the pictures that documents show."""
    parser = argparse.ArgumentParser(description="take pictures of dashboards and report")
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(NAMES)}")
    names = parser.parse_args().names or SHOWN
    if unknown := set(names) - set(NAMES):
        parser.error(f"no picture is named {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    browser = shutil.which(BROWSER)
    if browser is None:
        print(f"needs {BROWSER}: `make tools` installs it", file=sys.stderr)
        return 2
    boards = [name for name in names if name != "report"]
    is_shown = names == SHOWN
    try:
        take = take_vllm_boards if is_shown else take_boards
        taken = take(boards, FOLDER, browser) if boards else []
    except ObserveError as error:
        print(f"pictures: {error}", file=sys.stderr)
        return 2
    if is_shown:
        TAKEN.write_text(json.dumps({name: shown(name) for name in boards}, indent=2) + "\n")
    if "report" in names:
        taken.append(take_report(FOLDER / "report.png", browser))
    for path in taken:
        print(f"{path.name}: {path.stat().st_size:,} bytes", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
