"""Whether two plays have the same output: every token, and every log-probability within a limit."""

from __future__ import annotations

from collections.abc import Iterator

from kvoffload.cli.demo.play import Play, Turn
from kvoffload.cli.demo.results import Agreement, Mismatch

LOGPROB_LIMIT = 1e-3
_SHOWN = 10  # mismatches shown one by one


def compare(plain: Play, offloaded: Play) -> Agreement:
    """Compare answers turn by turn. Both plays had the same prompts."""
    pairs = list(zip(plain.turns, offloaded.turns, strict=True))
    mismatches = [found for one, other in pairs for found in _mismatches(one, other)]
    differences = [
        abs(a.logprob - b.logprob)
        for one, other in pairs
        for a, b in zip(one.answer, other.answer, strict=False)
    ]
    return Agreement(
        tokens=sum(len(turn.answer) for turn in plain.turns),
        mismatches=len(mismatches),
        first_mismatches=tuple(mismatches[:_SHOWN]),
        worst_logprob_difference=max(differences, default=0.0),
        logprob_limit=LOGPROB_LIMIT,
    )


def _mismatches(one: Turn, other: Turn) -> Iterator[Mismatch]:
    """Yield mismatches up to the first token that differs: after it the two continue different texts."""
    for place, (a, b) in enumerate(zip(one.answer, other.answer, strict=False)):
        # `not <=` counts a NaN as a mismatch.
        if a.token_id != b.token_id or not abs(a.logprob - b.logprob) <= LOGPROB_LIMIT:
            yield Mismatch(*one.turn, place, a.token_id, b.token_id, a.logprob, b.logprob)
        if a.token_id != b.token_id:
            return
    if len(one.answer) != len(other.answer):
        place = min(len(one.answer), len(other.answer))
        yield Mismatch(*one.turn, place, None, None, None, None)
