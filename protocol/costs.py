"""What work costs in seconds: a small model of steps and transfers, fitted while they happen.

This file owns the prediction that schedulers, policy and planner share. It is arithmetic over
what it was told; it must never read a clock, and never answer with a negative time.

The model is linear in what a step does: a fixed part (weights are read once, whatever the batch),
a part per token, a part per (token, position that it attends to) and a part per page that moves
between device and host. A transfer has a latency and a part per byte.

Life of a model: made with a first guess -> ``observe`` after every step or transfer -> ``predict``
and the marginal costs at any time. Old observations fade, so the model follows the machine.

The fit is least squares of the *relative* error under the bound that no coefficient is negative,
by coordinate descent over exponentially fading sums (Lawson and Hanson's problem, Franc's
sequential method). The error is relative to what was measured or what was predicted, whichever
is longer, so one step that took far too long or far too short counts as at most 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.errors import InternalError

MEMORY = 300  # observations after which one has faded to a third
SWEEPS = 4
TRUSTED_AFTER = 8  # observations before a prediction is held against a measured time


class LinearCost:
    """``seconds = sum(coefficient * amount)`` with coefficients that are never negative.

    ``guess`` holds the first coefficients, in seconds per unit.
    """

    def __init__(self, guess: Sequence[float], memory: int = MEMORY) -> None:
        if memory < 1 or any(c < 0 for c in guess):
            raise InternalError(f"a cost model from {tuple(guess)} with a memory of {memory}")
        self._fade = 1.0 - 1.0 / memory
        self._coefficients = list(guess)
        n = len(guess)
        self._products = [[0.0] * n for _ in range(n)]
        self._sums = [0.0] * n
        self.observed = 0

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Seconds per unit, as fitted so far."""
        return tuple(self._coefficients)

    def predict(self, amounts: Sequence[float]) -> float:
        """Seconds for these amounts."""
        return sum(c * a for c, a in zip(self._coefficients, amounts, strict=True))

    def observe(self, amounts: Sequence[float], seconds: float) -> None:
        """Work with these amounts took so long. What took no time says nothing."""
        if seconds <= 0.0:
            return
        unit = max(seconds, self.predict(amounts)) if self.observed >= TRUSTED_AFTER else seconds
        self.observed += 1
        scaled = [a / unit for a in amounts]
        target = seconds / unit
        for j, mine in enumerate(scaled):
            row = self._products[j]
            for k, other in enumerate(scaled):
                row[k] = row[k] * self._fade + mine * other
            self._sums[j] = self._sums[j] * self._fade + mine * target
        self._descend()

    def _descend(self) -> None:
        c = self._coefficients
        for _ in range(SWEEPS):
            for j, row in enumerate(self._products):
                if row[j] > 0.0:
                    rest = sum(row[k] * c[k] for k in range(len(c))) - row[j] * c[j]
                    c[j] = max(0.0, (self._sums[j] - rest) / row[j])


@dataclass(frozen=True, slots=True)
class StepShape:
    """What one step does. ``attended`` counts (token, position it attends to) pairs."""

    tokens: int
    attended: int
    copied_pages: int = 0

    @property
    def amounts(self) -> tuple[float, float, float, float]:
        """The amounts of the linear model; the first is the step itself."""
        return 1.0, self.tokens, self.attended, self.copied_pages


def attended_by(start: int, n_tokens: int) -> int:
    """Pairs of ``n_tokens`` new tokens after ``start`` earlier ones, each seeing itself too."""
    return n_tokens * start + n_tokens * (n_tokens + 1) // 2


class StepCosts:
    """Time of one worker's steps. First guess: a small model on a CPU, host copies at 2 GB/s."""

    def __init__(self, page_bytes: int = 1 << 20) -> None:
        self._fit = LinearCost((0.02, 1e-3, 1e-7, page_bytes / 2e9))

    @property
    def observed(self) -> int:
        """Steps that the model was fitted to."""
        return self._fit.observed

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Seconds per step, token, attended pair and copied page."""
        return self._fit.coefficients

    def observe(self, shape: StepShape, seconds: float) -> None:
        """A step of this shape took so long."""
        self._fit.observe(shape.amounts, seconds)

    def step_s(self, shape: StepShape) -> float:
        """How long a step of this shape takes."""
        return self._fit.predict(shape.amounts)

    def recompute_s(self, n_tokens: int, held: int = 0) -> float:
        """What computing ``n_tokens`` tokens after ``held`` adds to steps that run anyway."""
        _, token_s, pair_s, _ = self._fit.coefficients
        return n_tokens * token_s + attended_by(held, n_tokens) * pair_s

    def copy_s(self, n_pages: int) -> float:
        """What moving ``n_pages`` pages between device and host adds to a step."""
        return n_pages * self._fit.coefficients[3]


class TransferCosts:
    """Time of hand-offs between two workers. First guess: 1 ms and 1 GB/s."""

    def __init__(self) -> None:
        self._fit = LinearCost((1e-3, 1e-9))

    def observe(self, n_bytes: int, seconds: float) -> None:
        """A transfer of so many bytes took so long."""
        self._fit.observe((1.0, n_bytes), seconds)

    def transfer_s(self, n_bytes: int) -> float:
        """How long so many bytes take."""
        return self._fit.predict((1.0, n_bytes))
