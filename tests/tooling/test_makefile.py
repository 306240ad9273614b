import re
import subprocess

from tests.tooling.scripts import ROOT

MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, flags=re.MULTILINE))


def make(*arguments: str) -> str:
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_help_describes_every_target_in_80_columns() -> None:
    lines = make("help").splitlines()
    shown = dict(line.split(maxsplit=2)[1:] for line in lines if line.startswith("  make "))
    assert set(shown) == TARGETS - {"help"}
    assert all(len(sentence.split()) > 1 for sentence in shown.values())
    assert max(map(len, lines)) <= 80


def test_every_target_is_phony() -> None:
    (phony,) = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, flags=re.MULTILINE)
    assert set(phony.split()) == TARGETS


def test_ci_and_make_check_run_the_same_parts() -> None:
    (check,) = re.findall(r"^check: (.*?) *##", MAKEFILE, flags=re.MULTILINE)
    (parts,) = re.findall(r"^for part in (.*); do$", (ROOT / ".ci/run").read_text(), flags=re.MULTILINE)
    assert parts == check
    assert parts.split()[-1] == "test"
