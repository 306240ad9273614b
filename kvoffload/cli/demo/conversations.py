"""Conversations in turns: the prompt of a turn is all earlier messages and answers, and a new message."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvoffload.cli.demo.options import DemoOptions


class TurnId(NamedTuple):
    """One turn of one conversation; both count from 0."""

    conversation: int
    turn: int


Answers = Mapping[TurnId, Sequence[int]]


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of one conversation's user."""

    messages: tuple[bytes, ...]

    def prompt(self, answers: Sequence[Sequence[int]]) -> list[int]:
        """Return the prompt of the turn after these answers."""
        prompt: list[int] = []
        for message, answer in zip(self.messages, answers, strict=False):
            prompt += [*message, *answer]
        return [*prompt, *self.messages[len(answers)]]


def make_conversations(text: bytes, options: DemoOptions) -> list[Conversation]:
    """Cut the text into conversations; the seed decides which conversation gets which part."""
    size = options.message_tokens
    parts = [text[start : start + size] for start in range(0, options.conversations * size, size)]
    random.Random(options.seed).shuffle(parts)
    return [_converse(part, options) for part in parts]


class UnlimitedCache:
    """A prefix cache of whole blocks that evicts nothing: it measures what can be reused."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        # A block's number, from 1, by its parent's number and its tokens; 0 is the parent of first blocks.
        self._blocks: dict[tuple[int, tuple[int, ...]], int] = {}

    def reusable_tokens(self, prompt: Sequence[int]) -> int:
        """Return the tokens of the prompt that it holds; one token is always left to compute."""
        parent, found = 0, 0
        for block in self._whole_blocks(prompt[:-1]):
            known = self._blocks.get((parent, block))
            if known is None:
                break
            parent, found = known, found + self._block_tokens
        return found

    def add(self, computed: Sequence[int]) -> None:
        """Add the whole blocks of computed tokens."""
        parent = 0
        for block in self._whole_blocks(computed):
            parent = self._blocks.setdefault((parent, block), len(self._blocks) + 1)

    def _whole_blocks(self, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
        size = self._block_tokens
        for end in range(size, len(tokens) + 1, size):
            yield tuple(tokens[end - size : end])


def _converse(text: bytes, options: DemoOptions) -> Conversation:
    first, size = options.first_tokens, options.turn_tokens
    later = [text[start : start + size] for start in range(first, len(text), size)]
    return Conversation((text[:first], *later))
