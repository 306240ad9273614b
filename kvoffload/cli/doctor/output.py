"""The doctor's findings as text and as JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence

from kvoffload.checks.check import Answer, Verdict
from kvoffload.cli.exits import printable

_WIDTH = 80


def worst(answers: Sequence[Answer]) -> Verdict:
    """Return the verdict on all of it."""
    order = list(Verdict)
    return max((answer.finding.verdict for answer in answers), key=order.index, default=Verdict.GO)


def as_text(answers: Sequence[Answer], *, verbose: bool = False) -> str:
    """Return the verdict in one line, then a paragraph per problem, the worst first.

    Args:
        answers: of all checks.
        verbose: also a paragraph per check that passed.
    """
    order = list(Verdict)
    shown = sorted(answers, key=lambda answer: -order.index(answer.finding.verdict))
    passed = [answer for answer in shown if answer.finding.verdict is Verdict.GO]
    if not verbose:
        shown = shown[: len(shown) - len(passed)]
    lines = [f"{worst(answers)}: {_counted(answers)}"]
    if shown:
        lines += ["", *_lines(shown)]
    if passed and not verbose:
        lines += ["", f"{len(passed)} checks passed (--verbose lists them)"]
    return "\n".join(lines)


def as_json(answers: Sequence[Answer]) -> str:
    """Return one JSON object."""
    findings = [
        {
            "check": answer.check,
            "verdict": answer.finding.verdict,
            "finding": answer.finding.text,
            "remedy": answer.finding.remedy,
        }
        for answer in answers
    ]
    return json.dumps({"verdict": worst(answers), "findings": findings}, indent=1)


def _lines(answers: Sequence[Answer]) -> Iterator[str]:
    width = max(map(len, Verdict))
    indent = " " * (width + 1)
    for answer in answers:
        finding = answer.finding
        yield _wrapped(f"{finding.verdict:<{width}} ", f"{answer.check}: {finding.text}", indent)
        if finding.remedy:
            yield _wrapped(indent, f"remedy: {finding.remedy}", indent)


def _wrapped(head: str, text: str, indent: str) -> str:
    return textwrap.fill(
        printable(" ".join(text.split())),
        _WIDTH,
        initial_indent=head,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _counted(answers: Sequence[Answer]) -> str:
    found = [answer.finding.verdict for answer in answers]
    return ", ".join(f"{found.count(one)} {one}" for one in reversed(Verdict) if one in found)
