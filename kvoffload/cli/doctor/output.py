"""What was found, for people and for scripts."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence

from kvoffload.checks.check import Answer, Verdict

_WIDTH = 120


def worst(answers: Sequence[Answer]) -> Verdict:
    """Return what all of it comes to. What is not known stops nobody."""
    found = {answer.finding.verdict for answer in answers}
    return next((one for one in (Verdict.NO_GO, Verdict.WARNING) if one in found), Verdict.GO)


def as_text(answers: Sequence[Answer]) -> str:
    """Return one paragraph a check, and what it comes to in the last line."""
    return "\n".join([*_lines(answers), "", f"{worst(answers)}: {_counted(answers)}"])


def as_json(answers: Sequence[Answer]) -> str:
    """Return one object."""
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
    names = max(len(answer.check) for answer in answers)
    verdicts = max(map(len, Verdict))
    indent = " " * (verdicts + names + 4)
    for answer in answers:
        finding = answer.finding
        head = f"{finding.verdict:<{verdicts}}  {answer.check:<{names}}  "
        yield _wrapped(head, finding.text, indent)
        if finding.remedy:
            yield _wrapped(indent, f"remedy: {finding.remedy}", indent)


def _wrapped(head: str, text: str, indent: str) -> str:
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=head,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _counted(answers: Sequence[Answer]) -> str:
    found = [answer.finding.verdict for answer in answers]
    return ", ".join(f"{found.count(one)} {one}" for one in Verdict if one in found)
