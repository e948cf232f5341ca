"""What sampling remembers of a sequence so as not to read all of its tokens at every step.

This file owns the cache of derived state per (ticket, choice) and the token counts that penalties
need. Everything here is a function of the sequence's ``history``; a state that the history does
not continue exactly is thrown away and rebuilt, so that a recomputed, moved or failed-over
sequence goes on as if nothing had happened. It must never be the only place that knows something.

Life of a state: built at a sequence's first draw that needs it, fed with new tokens at each
further draw, dropped when its sequence was not drawn from for ``KEEP_STEPS`` steps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np

from kernels.settings import Draw
from protocol.errors import InternalError
from protocol.types import TicketId

KEEP_STEPS = 256


class State(Protocol):
    """Something derived from a sequence's tokens."""

    def feed(self, tokens: Sequence[int]) -> None:
        """Take in the answer's next tokens."""
        ...


S = TypeVar("S", bound=State)


class SequenceStates(Generic[S]):
    """One state per (ticket, choice), kept in step with the histories. See the file's head."""

    def __init__(self, build: Callable[[Draw, Sequence[int]], S]) -> None:
        """``build`` makes the state of a draw's sequence before its answer, given its prompt."""
        self._build = build
        self._kept: OrderedDict[tuple[TicketId | None, int], _Kept[S]] = OrderedDict()
        self._step = 0

    def __len__(self) -> int:
        return len(self._kept)

    def next_step(self) -> None:
        """A step begins: forget what was not used for long."""
        self._step += 1
        while self._kept:
            key, oldest = next(iter(self._kept.items()))
            if oldest.used_at > self._step - KEEP_STEPS:
                break
            del self._kept[key]

    def of(self, draw: Draw) -> S:
        """The state after the draw's history. Raises ``InternalError`` for a short history.

        Whatever ``build`` and ``feed`` raise passes through, and the state is dropped.
        """
        n_before = draw.n_prompt + draw.token_index
        if len(draw.history) < n_before or draw.n_prompt < 0:
            raise InternalError(
                f"{draw.ticket_id}: {len(draw.history)} tokens of history where {n_before} are "
                f"before the next"
            )
        key = (draw.ticket_id, draw.choice)
        kept = self._kept.pop(key, None)
        answer = draw.history[draw.n_prompt : n_before]
        if kept is None or not kept.continued_by(draw, answer):
            prompt = draw.history[: draw.n_prompt]
            kept = _Kept(self._build(draw, prompt), draw, prompt)
        new = answer[len(kept.answer) :]
        if new:
            kept.state.feed(new)
            kept.answer += new
        kept.history, kept.used_at = draw.history, self._step
        self._kept[key] = kept  # after what was used longer ago
        return kept.state


class _Kept(Generic[S]):
    """A state and what it was made from."""

    def __init__(self, state: S, draw: Draw, prompt: Sequence[int]) -> None:
        self.state = state
        self.params = draw.params
        self.prompt = prompt
        self.answer: list[int] = []
        self.history: Sequence[int] = draw.history
        self.used_at = 0

    def continued_by(self, draw: Draw, answer: Sequence[int]) -> bool:
        """Whether the state is that of the draw's sequence, some tokens ago."""
        if draw.params is not self.params and draw.params != self.params:
            return False
        if draw.n_prompt != len(self.prompt):
            return False
        if draw.history is not self.history and draw.history[: draw.n_prompt] != self.prompt:
            return False
        return answer[: len(self.answer)] == self.answer


class TokenCounts:
    """How often each token of a sequence occurs in its answer.

    Tokens of the prompt alone, with a count of 0, are included if ``prompt`` is given. ``ids``
    and ``counts`` are parallel; the views grow with the sequence's distinct tokens only.
    """

    def __init__(self, prompt: Sequence[int] = ()) -> None:
        ids = np.unique(np.array(prompt, dtype=np.int64))
        self._ids = np.empty(max(64, 2 * len(ids)), dtype=np.int64)
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self._ids[: len(ids)] = ids
        self._place = {token: i for i, token in enumerate(ids.tolist())}

    @property
    def ids(self) -> np.ndarray:
        """Distinct token ids, int64."""
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> np.ndarray:
        """Occurrences in the answer, float32."""
        return self._counts[: len(self._place)]

    def feed(self, tokens: Sequence[int]) -> None:
        """Count the answer's next tokens."""
        for token in tokens:
            place = self._place.setdefault(token, len(self._place))
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token
            self._counts[place] += 1
