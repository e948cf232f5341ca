"""How a batch of draws is made, as arrays.

This file owns the step from ``SamplingParams`` to numbers that a whole batch is drawn with. It
must never touch logits.

Shape suffix: Q draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from kernels.noise import keys
from protocol.types import SamplingParams, TicketId

GREEDY_BELOW = 1e-5  # smaller temperatures are greedy: dividing by them overflows
# A draw's status. Edited logits may hold minus infinity; NaN or infinity spoils them.
OK, NOT_FINITE, NOTHING_LEFT, SPOILED = 0, 1, 2, 3


@dataclass(slots=True)
class Draw:
    """One token to draw: how, its place within the answer, and what came before it. Never changed
    once it is made; not frozen, as that makes it three times as dear.

    ``row`` is the row of the logits. ``history`` holds the sequence's prompt, ``n_prompt``
    tokens, and at least ``token_index`` of its answer; it may be empty if nothing of ``params``
    looks back. ``ticket_id`` and ``choice`` name what may be cached about the sequence.
    """

    params: SamplingParams
    token_index: int
    choice: int = 0
    row: int = 0
    ticket_id: TicketId | None = None
    history: Sequence[int] = ()
    n_prompt: int = 0


@dataclass(frozen=True, slots=True)
class Settings:
    """Columns of the draws. ``temperature_Q`` 0 is greedy."""

    temperature_Q: np.ndarray  # float32
    top_k_Q: np.ndarray  # int64, 0: no cut
    top_p_Q: np.ndarray  # float64, 1: no cut
    min_p_Q: np.ndarray  # float64, 0: no cut
    key_Q: np.ndarray  # uint64, of the noise

    @property
    def random_Q(self) -> np.ndarray:
        """Which draws are not greedy."""
        return np.asarray(self.temperature_Q > 0)


def settings_of(draws: Sequence[Draw]) -> Settings:
    """The columns of ``draws``. Columns that no draw needs cost nothing."""
    temperatures = [d.params.temperature for d in draws]
    if not any([t >= GREEDY_BELOW for t in temperatures]):
        return _greedy(len(draws))
    temperature_Q = np.array(temperatures, dtype=np.float32)
    temperature_Q[~(temperature_Q >= GREEDY_BELOW)] = 0
    return Settings(
        temperature_Q,
        np.array([d.params.top_k for d in draws], dtype=np.int64),
        np.array([d.params.top_p for d in draws], dtype=np.float64),
        np.array([d.params.min_p for d in draws], dtype=np.float64),
        keys(
            [d.params.seed for d in draws],
            [d.choice for d in draws],
            [d.token_index for d in draws],
        ),
    )


@lru_cache(maxsize=512)
def _greedy(n: int) -> Settings:
    """``n`` greedy draws. The columns are shared by all steps: nobody writes to settings."""
    return Settings(
        np.zeros(n, np.float32),
        np.zeros(n, np.int64),
        np.ones(n),
        np.zeros(n),
        np.zeros(n, np.uint64),
    )
