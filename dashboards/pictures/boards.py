"""Pictures of the dashboards, drawn by Grafana's published components from a real Prometheus's answers."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dashboards.generate.files import FOLDER
from dashboards.generate.promql import substitute
from dashboards.observe.checks import wait_for_scrape
from dashboards.observe.demo import run_demo
from dashboards.observe.prometheus import SCRAPE_MS, ObserveError, Prometheus, run_prometheus
from kvoffload.remote.local import free_port

BOARDS = FOLDER / "grafana" / "dashboards"
_SOURCES = Path(__file__).with_name("grafana")
_BUILD = FOLDER.parent / ".venv" / "pictures"
_RATE = f"{5 * SCRAPE_MS}ms"
_PAGE = '<!doctype html><meta charset="utf-8"><link rel="stylesheet" href="board.css"><div id="root"></div>'
_ORIGIN = "http://pictures.invalid/"
_ICONS = Path("node_modules") / "@grafana" / "ui" / "dist" / "public"
_BUNDLE = [
    *(
        "node_modules/.bin/esbuild",
        "board.jsx",
        "--bundle",
        "--minify",
        "--outfile=board.js",
        "--jsx=automatic",
    ),
    *("--define:process.env.NODE_ENV='production'", "--log-level=error"),
    *("--loader:.ttf=empty", "--loader:.woff=dataurl", "--loader:.woff2=dataurl"),
]


def take_boards(names: Sequence[str], folder: Path, browser: str) -> list[Path]:
    """Run a demo under Prometheus and write a picture of each named dashboard into `folder`.

    Raises:
        ObserveError: a program is missing or fails, or a page reports an error.
    """
    _build()
    address = f"127.0.0.1:{free_port()}"
    with run_prometheus([address]) as prometheus, run_demo(address) as demo:
        start = time.time()
        wait_for_scrape(prometheus, [address])
        demo.result()
        wait_for_scrape(prometheus, [address])
        boards = [capture(prometheus, name, start, time.time()) for name in names]
    return [_take(board, folder, browser) for board in boards]


def capture(prometheus: Prometheus, name: str, start: float, end: float) -> dict[str, Any]:
    """Return a dashboard's JSON, with what Prometheus answers under every target's `answer`.

    Raises:
        ObserveError: Prometheus refuses a query.
    """
    board: dict[str, Any] = json.loads((BOARDS / f"{name}.json").read_text(encoding="utf-8"))
    tiers = [one["current"]["value"] for one in board["templating"]["list"] if one["name"] == "tier"]
    seconds = f"{max(int(end - start), 1)}s"
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            expr = substitute(target["expr"], _RATE, seconds, *tiers)
            target["answer"] = _answer(prometheus, expr, target.get("instant", False), start, end)
    return {"name": name, "from": start, "to": end, "board": board}


def _answer(prometheus: Prometheus, expr: str, is_instant: bool, start: float, end: float) -> list[Any]:
    if is_instant:
        found = prometheus.get("query", query=expr, time=end)
    else:
        found = prometheus.get("query_range", query=expr, start=start, end=end, step=SCRAPE_MS / 1000)
    series: list[Any] = found["result"]
    return series


def _build() -> None:
    """Install the locked packages, once for each lock, and bundle the page, in a folder that git ignores."""
    if shutil.which("npm") is None:
        raise ObserveError("there is no program `npm`: install Node.js 20 or newer")
    installed = _BUILD / "node_modules" / "installed.json"
    lock = (_SOURCES / "package-lock.json").read_bytes()
    shutil.copytree(_SOURCES, _BUILD, dirs_exist_ok=True)
    if not installed.exists() or installed.read_bytes() != lock:
        _run(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"])
        installed.write_bytes(lock)
    _run(_BUNDLE)
    (_BUILD / "board.html").write_text(_PAGE, encoding="utf-8")


def _run(command: list[str]) -> None:
    done = subprocess.run(
        command, cwd=_BUILD, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ObserveError(f"{command[0]} failed:\n{done.stderr[-2000:]}")


def _height(board: dict[str, Any]) -> int:
    """Return the pixels of a board's grid and of its title, at least."""
    places: list[dict[str, int]] = [panel["gridPos"] for panel in board["panels"]]
    return 38 * max(place["y"] + place["h"] for place in places) + 100


def _take(captured: dict[str, Any], folder: Path, browser: str) -> Path:
    from playwright.sync_api import Route, sync_playwright

    def serve(route: Route) -> None:
        """Answer from the build folder: components ask for icons by a server's paths, so a `file:` page will not do."""
        path = route.request.url.removeprefix(_ORIGIN)
        file = _BUILD / (_ICONS / path.removeprefix("public/build/") if "public/build/" in path else path)
        if file.is_file():
            route.fulfill(path=file)
        else:
            route.fulfill(status=404)

    target = folder / f"{captured['name']}.png"
    problems: list[str] = []
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        # As tall as the board, because tables draw only the rows that are in view.
        page = running.new_page(
            viewport={"width": 1540, "height": _height(captured["board"])}, color_scheme="dark"
        )
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.route(f"{_ORIGIN}**", serve)
        page.goto(f"{_ORIGIN}board.html")
        page.evaluate("captured => { window.captured = captured; }", captured)
        page.add_script_tag(path=_BUILD / "board.js")
        page.wait_for_load_state("networkidle")
        page.evaluate("() => document.fonts.ready")
        if problems:
            raise ObserveError(f"{captured['name']}: {problems[0]}")
        page.locator("#board").screenshot(path=target)
        running.close()
    return target
