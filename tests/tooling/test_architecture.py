from __future__ import annotations

import re

from tests.tooling.scripts import ROOT

ARCHITECTURE = (ROOT / "kvoffload" / "ARCHITECTURE.md").read_text()
DECISIONS = (ROOT / "kvoffload" / "DECISIONS.md").read_text()
FOLDERS = (ROOT, ROOT / "kvoffload", ROOT / "plugins" / "kvoffload_vllm", ROOT / "kvoffload" / "transfer")


def test_the_files_that_the_pages_name_exist() -> None:
    named = set(re.findall(r"`([\w/]+\.(?:py|md))`", ARCHITECTURE + DECISIONS))
    assert named
    assert [name for name in named if not any((folder / name).exists() for folder in FOLDERS)] == []


def test_the_classes_and_functions_named_in_the_architecture_exist() -> None:
    sources = [
        path.read_text() for folder in ("kvoffload", "plugins") for path in (ROOT / folder).rglob("*.py")
    ]
    defined = set(re.findall(r"^\s*(?:async )?(?:class|def) (\w+)", "\n".join(sources), re.MULTILINE))
    named = re.findall(r"`([A-Z][a-z]\w+)(?:\.(\w+))?`", ARCHITECTURE)
    assert len(named) > 50
    assert [name for pair in named for name in pair if name and name not in defined] == []


def test_every_rule_has_a_test_that_exists() -> None:
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    rows = re.findall(r"^\| R(\d+) .*`(test_\w+)` \|$", ARCHITECTURE, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 22))
    assert [name for _, name in rows if f"def {name}(" not in tests] == []
