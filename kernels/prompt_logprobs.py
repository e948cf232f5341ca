"""Logprobs of a prompt's tokens: the model's head over every position of a chunk, in slices.

This file owns the way to those logits. A forward pass gives logits of the sampled positions only;
here its last hidden states are kept and the model is called again with them, slice by slice, in
place of its layers, so that what a family does after its head (scales, soft caps) is its own code
and the logits of a whole chunk (400 MB for 2,048 tokens of a vocabulary of 49k) never exist. It
must never change a model: what is put in its way is taken out again at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kernels.model import forward
from kernels.sampling import Sampler
from protocol.errors import InternalError, TandemError
from protocol.step import StepRow
from protocol.types import TokenLogprobs

SLICE = 64  # positions: 13 MB of logits for a vocabulary of 49k


class HiddenStates:
    """The last hidden states ``[1, T, hidden]`` of the forward pass made inside ``kept``."""

    def __init__(self, module: Any) -> None:
        self._module = module
        base = module.base_model
        self._base = getattr(base, "decoder", base)  # opt keeps its layers one floor lower
        self._output: Any = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the hidden states of the forward pass inside."""

        def keep(_module: Any, _args: Any, output: Any) -> None:
            self._output = output

        handle = self._base.register_forward_hook(keep)
        try:
            yield
        finally:
            handle.remove()

    def logits(self, first: int, end: int) -> torch.Tensor:
        """Raw logits ``[end - first, vocab]`` of these places of the packed line."""
        if self._output is None:
            raise InternalError("the model's layers were not called where they are looked for")
        hidden = self._output.last_hidden_state[:, first:end]
        slice_of = type(self._output)(last_hidden_state=hidden)
        here = self._base.__dict__.get("forward")
        self._base.forward = lambda *_, **__: slice_of
        try:
            places = torch.arange(end - first, device=hidden.device)
            return forward(self._module, places, logits_to_keep=places)
        finally:
            if here is None:
                del self._base.forward
            else:
                self._base.forward = here


def prompt_logprobs(
    states: HiddenStates, row: StepRow, q_start: int, sampler: Sampler
) -> tuple[TokenLogprobs, ...]:
    """Of the prompt tokens at positions ``start + 1`` up to the one after the row's last token.

    ``q_start`` is the row's place in the packed line. Raises ``InternalError`` for a history
    that is too short or logits that are not finite.
    """
    k = row.prompt_logprobs or 0
    n = max(0, min(len(row.tokens), row.n_prompt - row.start - 1))  # the last has no successor
    followers = row.history[row.start + 1 : row.start + 1 + n]
    if len(followers) < n:
        raise InternalError(
            f"{row.ticket_id}: {len(row.history)} tokens of history for logprobs up to "
            f"{row.start + n}"
        )
    if n == 0:
        return ()
    tables = []
    for first in range(0, n, SLICE):
        end = min(first + SLICE, n)
        logits = states.logits(q_start + first, q_start + end)
        tables.append(sampler.prompt_table(logits, followers[first:end], k))
    try:
        return tuple(sampler.prompt_logprobs(tables, followers, k))
    except TandemError as e:
        raise InternalError(f"{row.ticket_id}: {e.message}") from e
