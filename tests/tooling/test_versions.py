"""The table of vLLM versions is in the form that its command writes."""

from __future__ import annotations

import re

import pytest

from tests.tooling.scripts import ROOT
from tests.vllm.versions import matrix
from tests.vllm.versions.test_small_suite import SCENES

README = (ROOT / "plugins" / "kvoffload_vllm" / "README.md").read_text(encoding="utf-8")
SEVERAL_GROUPS = "all these, hybrid model", "all these, recurrent layers (LFM2)"


def rows() -> list[list[str]]:
    (table,) = re.findall(r"<!-- versions -->\n(.*?)<!-- /versions -->", README, flags=re.DOTALL)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_rows_that_were_not_run_stay() -> None:
    assert matrix.written_rows(README) == {row[0]: row for row in rows()[2:]}


def junit(**results: str) -> str:
    """Return pytest's report of a suite, with a result per test; nothing for passed."""
    cases = (
        f'<testcase file="tests/vllm/versions/test_small_suite.py" name="{name}">{result}</testcase>'
        for name, result in results.items()
    )
    return f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>"


def test_it_has_the_scenes_of_the_suite_and_the_versions_of_the_lock() -> None:
    title, _, *body = rows()
    assert title == ["vLLM", *matrix.COLUMNS]
    assert set(matrix.SCENES.values()) == {scene.__name__ for scene in SCENES}
    labels = [row[0] for row in body]
    # The rows of the other runner take long, and are written when they are run.
    expected = [setup.label for setup in matrix.setups() if setup.runner == "V1" or setup.label in labels]
    assert labels == expected, "the table of versions is out of date: make vllm-versions"
    assert matrix.filled(README, body) == README, "the table was edited by hand: make vllm-versions"


def test_what_is_repeated_are_the_rows_of_the_other_versions() -> None:
    repeated = {setup.label for setup in matrix.setups() if not setup.is_covered}
    assert repeated == {*matrix.versions()} - {matrix.installed()}


def test_it_has_what_is_promised() -> None:
    for label, *cells in rows()[2:]:
        reported = dict(zip(matrix.COLUMNS, cells, strict=True))
        several, more, disk = (
            {reported.pop(name) for name in SEVERAL_GROUPS},
            reported.pop("layouts, metrics, events"),
            reported.pop("disk, found after a restart"),
        )
        if label in matrix.TOO_OLD:
            assert {*several, disk, *reported.values()} == {matrix.REFUSED}
            continue
        assert {more, *reported.values()} == {"passed"}
        assert disk == "passed" or (disk == "not run" and label.endswith("V2"))
        if label.endswith("V2"):
            several.discard("not run")  # recurrent layers, whose kernels are also interpreted
        assert several == {matrix.REFUSED if label == "0.28.0" else "passed"}


@pytest.mark.parametrize(
    ("scene", "control", "cell"),
    [
        ("", "", "passed"),
        ("<failure/>", "", "failed"),
        ("", "<error/>", "failed"),
        ('<skipped message="refused at start"/>', '<skipped message="refused at start"/>', matrix.REFUSED),
        ("", '<skipped message="refused at start"/>', "not run"),
        ('<skipped message="why not"/>', "", "not run"),
    ],
)
def test_a_scene_has_passed_when_its_control_has_too(scene: str, control: str, cell: str) -> None:
    results = matrix.read_results(
        junit(**{"test_scene[qwen3-reloaded]": scene, "test_control[qwen3-reloaded]": control})
    )
    reported = dict(
        zip(matrix.COLUMNS, matrix.Ran(matrix.Setup("9"), True, results, "").cells()[1:], strict=True)
    )
    assert reported.pop("reload") == cell
    assert set(reported.values()) == {"not run"}
