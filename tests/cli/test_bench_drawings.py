"""The pictures of what benches found, of the results that are kept here."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvoffload.bench import drawings
from tests.cli.test_bench_lines import QUEUE, ratio

RESULTS = Path(__file__).parents[2] / "kvoffload" / "bench" / "results"
_SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    """Return the texts of a picture that needs nothing but itself."""
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{_SVG}svg"
    assert not [each for each in root.iter() if any("href" in name for name in each.attrib)]
    return [each.text or "" for each in root.iter(f"{_SVG}text")]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("engine", ["With offloading over without it, times", "step, copies pending", "recomputed"]),
        ("serve", ["First token of returning turns, milliseconds", "plain", "kvoffload", "peer"]),
        ("convoy", ["50 requests with one prefix of 10,000 tokens", "all, recomputed"]),
        ("hooks", ["In hooks per step, each decoding step, microseconds", "hybrid windows, 128 running"]),
    ],
)
def test_what_was_found_here_can_be_drawn(name: str, wanted: list[str]) -> None:
    (path,) = RESULTS.glob(f"{name}-*2-cores.json")
    shown = texts(getattr(drawings, name)(json.loads(path.read_text())))
    assert set(wanted) <= set(shown)


def test_connectors_share_the_panels_of_requests_that_wait() -> None:
    cases = [{**case, "many_us": ratio(300.0)} for case in QUEUE["cases"]]
    shown = texts(drawings.queue({"machine": {"cpu": "x"}, "method": "y", "cases": cases}))
    assert {"cpu x", "y", "10,000 waiting", "kvoffload", "OffloadingConnector"} <= set(shown)
