import shutil
import subprocess

import pytest

from tests.tooling.scripts import ROOT

TOP_LEVEL = {
    *("kvoffload", "plugins", "tests", "dashboards", "docs", "findings", ".ci"),
    *("pyproject.toml", "Makefile", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"),
    ".gitignore",
}


@pytest.fixture
def files() -> list[str]:
    """Return every file that is in the repository, or would be after `git add`."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return [name for name in listed if (ROOT / name).exists()]


def test_the_top_level_has_only_known_names(files: list[str]) -> None:
    assert {name.partition("/")[0] for name in files} - TOP_LEVEL == set()


def test_no_file_is_large(files: list[str]) -> None:
    assert [name for name in files if (ROOT / name).stat().st_size > 1_000_000] == []


def test_scripts_are_executable() -> None:
    scripts = [ROOT / ".ci" / name for name in ("python", "run", "timed", "tools")]
    for path in (*scripts, *(ROOT / "findings").glob("*.sh")):
        assert path.stat().st_mode & 0o111, path


def test_each_finding_begins_with_what_is_expected_what_happens_and_the_versions() -> None:
    for path in (ROOT / "findings").glob("*.sh"):
        head = path.read_text(encoding="utf-8").partition("\nset -")[0]
        places = [head.find(f"# {word}: ") for word in ("Expected", "Happens", "Versions")]
        assert -1 < places[0] < places[1] < places[2], path
