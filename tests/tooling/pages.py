"""Lists the pages of the documentation site, and the shell commands on each page."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.tooling.scripts import ROOT

PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("dashboards/*.md"),
        *ROOT.glob("kvoffload/**/*.md"),
        *ROOT.glob("plugins/**/*.md"),
        *ROOT.glob("tests/bench/*.md"),
    ]
)

_BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NEEDS = re.compile(r"# needs (.*)\n")
_FOREVER = "# runs until Ctrl-C\n"


@dataclass(frozen=True)
class Block:
    """One block of commands on a page.

    Args:
        text: the lines, for a shell.
        needs: what the commands need but tests do not have, such as a GPU; empty if the commands run in a
            test.
        is_endless: whether the commands run until they are interrupted.
    """

    text: str
    needs: str
    is_endless: bool


def blocks(page: Path) -> list[Block]:
    """Return the page's fenced blocks of shell commands, in order."""
    found = []
    for text in _BLOCK.findall(page.read_text(encoding="utf-8")):
        needs = _NEEDS.match(text)
        found.append(Block(text, needs[1] if needs else "", text.startswith(_FOREVER)))
    return found
