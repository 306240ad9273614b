from __future__ import annotations

import pytest

from kvoffload_vllm.support import RUN, VERSIONS
from tests.tooling.scripts import ROOT
from tests.vllm.versions import matrix
from tests.vllm.versions.test_each_version import SCENES

README = (ROOT / "plugins" / "kvoffload_vllm" / "README.md").read_text(encoding="utf-8")
DRAFTS = "draft model", "EAGLE head", "n-grams"
SEVERAL_GROUPS = "all these, hybrid model", "all these, recurrent layers (LFM2)"


def test_the_table_of_versions_has_every_scene_and_locked_version() -> None:
    title, *body = matrix.written_rows(README).values()
    assert title == ["vLLM", *matrix.COLUMNS]
    assert set(matrix.SCENES.values()) == {scene.__name__ for scene in SCENES}
    labels = [row[0] for row in body]
    # The rows of runner V2 take long, so they are in the table only if they were run.
    expected = [setup.label for setup in matrix.setups() if setup.runner == "V1" or setup.label in labels]
    assert labels == expected, "the table of versions is out of date: make vllm-versions"
    assert matrix.filled(README, body) == README, "the table was edited by hand: make vllm-versions"


def test_the_versions_that_were_run_are_those_of_the_table() -> None:
    labels = [setup.label for setup in matrix.setups() if setup.runner == "V1"]
    assert [label.removesuffix(".0") for label in labels if label not in matrix.TOO_OLD] == [*RUN]


@pytest.mark.parametrize(
    "page",
    ["README.md", "CHANGELOG.md", "docs/install.md", "docs/platforms.md", "plugins/kvoffload_vllm/README.md"],
)
def test_documents_and_doctor_name_the_same_versions(page: str) -> None:
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert VERSIONS in text


def test_every_promised_cell_of_the_version_table_passed() -> None:
    for label, *cells in [*matrix.written_rows(README).values()][1:]:
        reported = dict(zip(matrix.COLUMNS, cells, strict=True))
        several, drafts, more, disk = (
            {reported.pop(name) for name in SEVERAL_GROUPS},
            [reported.pop(name) for name in DRAFTS],
            reported.pop("layouts, metrics, events"),
            reported.pop("disk, found after a restart"),
        )
        if label in matrix.TOO_OLD:
            assert {*several, *drafts, disk, *reported.values()} == {matrix.REFUSED}
            continue
        assert {more, *reported.values()} == {"passed"}
        assert drafts == drafts_of(label)
        assert disk == "passed" or (disk == "not run" and label.endswith("V2"))
        if label.endswith("V2"):
            # Recurrent layers are not run: their kernels would run in an interpreter, which is slow.
            several.discard("not run")
        assert several == {matrix.REFUSED if label == "0.28.0" else "passed"}


def drafts_of(label: str) -> list[str]:
    """Return what a row must have of drafts. `versions/test_speculation.py` has the reasons of what is not run."""
    if label == "0.30.0":
        return ["not run"] * 3
    if label == "0.30.0, runner V2":
        return ["not run", "passed", "not run"]
    return ["passed", "passed", "not run" if label.endswith("V2") else "passed"]
