"""Plays a journal's lines into a core of its own and compares what comes out."""

from __future__ import annotations

from collections import deque
from typing import Any

from kvoffload.cli.exits import CommandError
from kvoffload.cli.replay.device import AnsweringDevice, Diverged
from kvoffload.core.offload_core import OffloadCore
from kvoffload.core.state import Policy
from kvoffload.model.causes import DegradeCause
from kvoffload.model.engine import EngineShape
from kvoffload.model.events import Event, FirstTokenReached, NetBenefitTurned, ResetEnded
from kvoffload.model.facts import Fact, LawBroken
from kvoffload.telemetry.journal import Record
from kvoffload.telemetry.records import Summary, to_plain
from kvoffload.telemetry.replay_form import FACTS, FORMAT, KeyNumbers, read, write
from kvoffload.telemetry.replay_journal import ANSWERS, HEADER, LOOKUP, QUESTION, REPLAY

NOT_THE_CORES = (FirstTokenReached, NetBenefitTurned, ResetEnded)
"""Events of those who watch: they follow from the core's, and from clocks."""


class Violation(Exception):
    """Raised when a conservation law does not hold after a line; `problems` says which."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n  ".join(["a law does not hold", *problems]))


class Player:
    """Takes lines in order. A second header begins a second engine, whose process went on with the file.

    Args:
        audit_every: the core is audited after every so many facts and questions.
    """

    def __init__(self, audit_every: int = 1) -> None:
        self.facts = self.questions = self.events = 0
        self._audit_every = audit_every
        self._device = AnsweringDevice()
        self._core: OffloadCore | None = None
        self._sequence = 0
        self._expected: deque[Event] = deque()
        self._raised: Exception | None = None

    def play(self, record: Record) -> None:
        """Take one line.

        Raises:
            Diverged: the core decides otherwise.
            Violation: a conservation law does not hold.
            CommandError: the journal does not carry what is needed.
            ValueError: the line is not what a journal for a replay has.
        """
        message = record.message
        if isinstance(message, Summary) and message.name == HEADER:
            self._begin(message.fields)
        elif self._core is None:
            raise CommandError(
                'it was not written for a replay: set journal_for to "replay" beside journal_path'
            )
        elif record.sequence != self._sequence + 1:
            missing = record.sequence - self._sequence - 1
            raise CommandError(f"{missing} lines are missing before it: they were told faster than written")
        else:
            self._take(self._core, message)
        self._sequence = record.sequence

    def end(self) -> None:
        """The journal ends here, whole.

        Raises:
            Diverged: the core told more than the journal has.
        """
        self._check_raised(None)
        if self._core is not None:
            self._expected.extend(self._core.take_events())
        if self._expected:
            raise Diverged("nothing more", _text(self._expected[0]))

    def _begin(self, fields: Any) -> None:  # noqa: ANN401  # what JSON knows
        if fields.get("format") != FORMAT:
            raise CommandError(
                f"it has the replay format {fields.get('format')}, written by kvoffload {fields.get('version')}; this "
                f"one reads format {FORMAT}"
            )
        shape, policy = read(fields["shape"], EngineShape), read(fields["policy"], Policy)
        self._core = OffloadCore(shape, policy, self._device)
        self._expected.clear()

    def _take(self, core: OffloadCore, message: Event | Summary) -> None:
        if isinstance(message, Event):
            self.events += 1
            if not isinstance(message, NOT_THE_CORES):
                self._compare_event(core, message)
            return
        if message.name == QUESTION:
            self._ask(core, message.fields)
        else:
            self._tell(core, message)
        if (self.facts + self.questions) % self._audit_every == 0 and (problems := core.audit()):
            raise Violation(problems)

    def _tell(self, core: OffloadCore, message: Summary) -> None:
        cls, in_full = FACTS.get(message.name), message.fields.get(REPLAY)
        if cls is None or not isinstance(in_full, dict):
            raise ValueError(f"{message.name} is no fact that can be told again")
        fact: Fact = read(in_full["fact"], cls)
        self._check_raised(fact)
        self._device.expect(in_full["device"])
        self.facts += 1
        for kind, handler in core.handlers():
            if isinstance(fact, kind):
                self._handle(handler, fact)
        self._device.check_done()

    def _handle(self, handler: Any, fact: Fact) -> None:  # noqa: ANN401  # a handler of any fact
        """As the bus does: what one handler raises does not keep the next from its turn."""
        try:
            handler(fact)
        except Diverged:
            raise
        except Exception as error:
            self._raised = self._raised or error

    def _ask(self, core: OffloadCore, fields: Any) -> None:  # noqa: ANN401  # what JSON knows
        self._check_raised(None)
        self._device.expect(fields["device"])
        self.questions += 1
        question = fields["question"]
        if question not in ANSWERS:
            raise ValueError(f"{question!r} is no question to a core")
        arguments = {name: read(value, LOOKUP[name]) for name, value in fields["arguments"].items()}
        answer, raised = None, None
        try:
            answer = write(getattr(core, question)(**arguments), ANSWERS[question], KeyNumbers())
        except Diverged:
            raise
        except Exception as error:
            raised = type(error).__name__
        if (answer, raised) != (fields["answer"], fields["raised"]):
            raise Diverged(
                f"{question} -> {fields['raised'] or fields['answer']}", f"{question} -> {raised or answer}"
            )
        self._device.check_done()

    def _compare_event(self, core: OffloadCore, event: Event) -> None:
        """Events are taken where the journal has them: taking them adds up what was counted until then."""
        self._check_raised(None)
        if not self._expected:
            self._expected.extend(core.take_events())
        mine = self._expected.popleft() if self._expected else None
        if mine is None or to_plain(mine) != to_plain(event):
            raise Diverged(_text(event), _text(mine) if mine is not None else "nothing")

    def _check_raised(self, next_fact: Fact | None) -> None:
        """A core that raised was switched off, which is the next fact; unless it was off already."""
        error, self._raised = self._raised, None
        if error is None or (self._core is not None and self._core.state.degraded is not None):
            return
        if not (isinstance(next_fact, LawBroken) and next_fact.cause is DegradeCause.HANDLER_RAISED):
            raise Diverged("the core goes on", f"the core raises {error!r}")


def _text(event: Event) -> str:
    plain = to_plain(event)
    name = plain.pop("event")
    return f"{name}({', '.join(f'{key}={value}' for key, value in plain.items())})"
