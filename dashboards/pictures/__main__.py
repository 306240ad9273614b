"""`make screenshot`: a demo of less than a minute with `--report`, and the top of its page as a browser shows it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TARGET = Path(__file__).with_name("report.png")
BROWSER = "chromium-headless-shell"
# Less than the default, so that it takes a minute; the host has a little more room than the conversations need.
DEMO = "demo --conversations 8 --turns 4 --first-tokens 768 --host-bytes 64MiB"
WIDTH, HEIGHT, SCALE = 1100, 1285, 0.85  # the README is about that wide


def take(page: Path, target: Path, browser: str) -> None:
    """Write what a browser shows of the page at first sight."""
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
    """Make the picture anew."""
    browser = shutil.which(BROWSER)
    if browser is None:
        print(f"needs {BROWSER}: `make tools` installs it", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        command = [sys.executable, "-m", "kvoffload.cli", *DEMO.split(), "--report", str(page)]
        subprocess.run(command, check=True)
        take(page, TARGET, browser)
    print(f"{TARGET.name}: {TARGET.stat().st_size:,} bytes", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
