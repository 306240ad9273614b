"""The documentation site builds, and none of its links leads nowhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tooling.scripts import ROOT

BUILD = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [*BUILD, "-c", str(ROOT / "docs"), str(ROOT), str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "docs/index.html" in (tmp_path / "index.html").read_text(encoding="utf-8")
    listed = (tmp_path / "docs" / "index.html").read_text(encoding="utf-8")
    for page in ("install", "configure", "comparison", "plugins"):
        assert f'href="{page}.html"' in listed


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("link", ["nowhere.md", "docs/install.md#nowhere"])
def test_a_link_that_leads_nowhere_ends_the_build(link: str, tmp_path: Path) -> None:
    """On two pages with the site's own settings."""
    source, out = tmp_path / "source", tmp_path / "out"
    (source / "docs").mkdir(parents=True)
    (source / "README.md").write_text(f"# One\n\n[two]({link})\n", encoding="utf-8")
    (source / "docs" / "install.md").write_text("# Two\n", encoding="utf-8")
    index = "# Index\n\n```{toctree}\n../README\ninstall\n```\n"
    (source / "docs" / "index.md").write_text(index, encoding="utf-8")
    command = [*BUILD, "-c", str(ROOT / "docs"), str(source), str(out)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "nowhere" in done.stderr
