"""Takes pictures of the dashboards, which Grafana's published components draw with the data of a real Prometheus."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dashboards.generate.files import FOLDER
from dashboards.generate.promql import substitute
from dashboards.observe.checks import wait_for_scrape
from dashboards.observe.demo import run_demo
from dashboards.observe.prometheus import SCRAPE_MS, ObserveError, Prometheus, end, run_prometheus
from kvoffload.remote.local import free_port

BOARDS = FOLDER / "grafana" / "dashboards"
_SOURCES = Path(__file__).with_name("grafana")
_END_S = 180.0  # `traffic.py` ends its two servers one after the other
_VLLM = FOLDER.parent / ".venv" / "vllm" / "bin" / "python"
_BUILD = FOLDER.parent / ".venv" / "pictures"
SERVE_S, EVERY_MS, RATE_MS = 600, 5000, 60_000
"""How many seconds the vLLM engines serve by default; in milliseconds, the scrape interval and the period of rates."""
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
    """Run a demo that Prometheus scrapes, and write a picture of each named dashboard into `folder`.

    Args:
        names: the dashboards' names.
        folder: the folder for the pictures.
        browser: the path of a headless Chromium.

    Raises:
        ObserveError: a program is missing or fails, or a page in the browser reports an error.
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


def take_vllm_boards(names: Sequence[str], folder: Path, browser: str, seconds: float) -> list[Path]:
    """Run two stock vLLM engines that Prometheus scrapes, and write a picture of each named dashboard into `folder`.

    Args:
        names: the dashboards' names.
        folder: the folder for the pictures.
        browser: the path of a headless Chromium.
        seconds: the time for which the engines serve conversations.

    Raises:
        ObserveError: a program is missing or fails, offloading saved no time, or a panel has no data.
    """
    _build()
    with _vllm_engines(seconds) as (addresses, engines), run_prometheus(addresses, EVERY_MS) as prometheus:
        wait_for_scrape(prometheus, addresses)
        start = time.time()
        _line_of(engines, then="served")
        wait_for_scrape(prometheus, addresses)
        boards = [
            capture(prometheus, name, start, time.time(), step_ms=EVERY_MS, rate_ms=RATE_MS) for name in names
        ]
    if problems := [problem for board in boards for problem in unfit(board)]:
        raise ObserveError("not fit for a picture:\n" + "\n".join(problems))
    return [_take(board, folder, browser) for board in boards]


@contextmanager
def _vllm_engines(seconds: float) -> Iterator[tuple[list[str], subprocess.Popen[str]]]:
    """Run `traffic.py` until the `with` block ends. Yield the engines' addresses and the process."""
    if not _VLLM.exists():
        raise ObserveError("there is no stock vLLM in .venv/vllm: `make vllm-env` installs it")
    root = FOLDER.parent
    process = subprocess.Popen(
        [_VLLM, "-m", "dashboards.pictures.traffic", "--seconds", str(seconds)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": f"{root}:{root / 'plugins'}"},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield json.loads(_line_of(process, then="[")), process
    finally:
        end(process, _END_S)


def _line_of(process: subprocess.Popen[str], then: str) -> str:
    """Return the next line of `traffic.py`'s output that starts with `then`.

    `traffic.py` waits until it is sent a line, except before its first answer, which starts with "[".
    """
    assert process.stdin is not None
    assert process.stdout is not None
    if then != "[":
        print(file=process.stdin, flush=True)
    for line in process.stdout:
        if line.startswith(then):
            return line
    raise ObserveError("the vLLM engines ended")


def unfit(captured: dict[str, Any]) -> list[str]:
    """Return the reasons not to show a dashboard: panels without data, panels with only zeros, no net benefit."""
    problems = []
    for panel in captured["board"]["panels"]:
        answers = [series for target in panel.get("targets", []) for series in target["answer"]]
        values = [float(value) for series in answers for _, value in series.get("values", [])]
        if panel["type"] != "row" and not answers:
            problems.append(f"{panel['title']}: no data")
        elif panel["type"] in ("timeseries", "heatmap") and not any(
            value and value == value for value in values
        ):
            problems.append(f"{panel['title']}: nothing but zeros")
        # Unlike `<=`, `not >` is True for a NaN.
        elif panel["title"] == "Net seconds saved" and not float(answers[0]["value"][1]) > 0:
            problems.append(f"{panel['title']}: {answers[0]['value'][1]}, so no gain")
    return problems


def shown(name: str) -> str:
    """Return a digest of a dashboard's title and panels, without the panels' info texts and links."""
    board = json.loads((BOARDS / f"{name}.json").read_text(encoding="utf-8"))
    panels = [
        {key: value for key, value in panel.items() if key not in ("description", "links", "id")}
        for panel in board["panels"]
    ]
    text = json.dumps([board["title"], panels], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def capture(
    prometheus: Prometheus,
    name: str,
    start: float,
    until: float,
    *,
    step_ms: int = SCRAPE_MS,
    rate_ms: int = 5 * SCRAPE_MS,
) -> dict[str, Any]:
    """Return a dashboard's JSON, in which each query has Prometheus's result under `answer`.

    Args:
        prometheus: the server.
        name: the dashboard's name.
        start: the start of the time range, in unix seconds.
        until: the end of the time range, in unix seconds.
        step_ms: the time between two values of a series, in milliseconds.
        rate_ms: the period of rates, in milliseconds.

    Raises:
        ObserveError: Prometheus refuses a query.
    """
    board: dict[str, Any] = json.loads((BOARDS / f"{name}.json").read_text(encoding="utf-8"))
    tiers = [one["current"]["value"] for one in board["templating"]["list"] if one["name"] == "tier"]
    seconds = f"{max(int(until - start), 1)}s"
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            expr = substitute(target["expr"], f"{rate_ms}ms", seconds, *tiers)
            target["answer"] = _answer(prometheus, expr, target.get("instant", False), start, until, step_ms)
    return {"name": name, "from": start, "to": until, "board": board}


def _answer(
    prometheus: Prometheus, expr: str, is_instant: bool, start: float, until: float, step_ms: int
) -> list[Any]:
    if is_instant:
        found = prometheus.get("query", query=expr, time=until)
    else:
        found = prometheus.get("query_range", query=expr, start=start, end=until, step=step_ms / 1000)
    series: list[Any] = found["result"]
    return series


def _build() -> None:
    """Build the page in a folder that git ignores. Install npm packages only if `package-lock.json` has changed."""
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
    """Return the height of a dashboard's title and panels, in pixels."""
    places: list[dict[str, int]] = [panel["gridPos"] for panel in board["panels"]]
    return 38 * max(place["y"] + place["h"] for place in places) + 100


def _take(captured: dict[str, Any], folder: Path, browser: str) -> Path:
    from playwright.sync_api import Route, sync_playwright

    def serve(route: Route) -> None:
        """Answer the browser's request with a file from the build folder.

        The browser cannot open the page as a file, because Grafana's components request icons from a server.
        """
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
        # The window is as tall as the dashboard, because tables draw only visible rows.
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
