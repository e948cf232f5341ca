"""Drives a ``Runner`` by hand: sequences, the rows of a step, a pool of NaN. For device tests.

This file owns what a scheduler would do in a worker, so that a test chooses every chunk itself.
It must never compare answers.
"""

from __future__ import annotations

import torch

from kernels.model import LoadedModel
from kernels.runner import Runner
from protocol.step import StepRow
from protocol.types import SamplingParams, TicketId

PAGE = 4
GREEDY = SamplingParams(max_tokens=64)


def new_runner(
    model: LoadedModel, pages: int = 64, backend: str | None = None, host_pages: int = 0
) -> Runner:
    """A runner over a pool of NaN, with pages of ``PAGE`` tokens."""

    def pool(n: int) -> torch.Tensor:
        g = model.geometry(PAGE)
        shape = (n, g.layers, 2, PAGE, g.kv_heads, g.head_dim)
        return torch.full(shape, float("nan"), dtype=getattr(torch, g.dtype))

    return Runner(model, pool(pages), PAGE, backend, pool(host_pages) if host_pages else None)


class Sequence:
    """One request as a test drives it: its tokens so far, and how many are computed."""

    def __init__(self, name: str, prompt: list[int], pages: list[int], sampling=GREEDY) -> None:
        self.id, self.tokens, self.pages = TicketId(name), list(prompt), pages
        self.n_prompt, self.done, self.sampling = len(prompt), 0, sampling

    def row(self, n: int) -> StepRow:
        n = min(n, len(self.tokens) - self.done)
        last = self.done + n == len(self.tokens)
        return StepRow(
            self.id,
            self.tokens[self.done : self.done + n],
            self.done,
            self.pages,
            self.sampling if last else None,
            len(self.tokens) - self.n_prompt,
            history=self.tokens,
            n_prompt=self.n_prompt,
            prompt_logprobs=self.sampling.prompt_logprobs,
        )

    @property
    def output(self) -> list[int]:
        return self.tokens[self.n_prompt :]


def step(runner: Runner, advance: dict[Sequence, int]) -> None:
    rows = [s.row(n) for s, n in advance.items()]
    result = runner.run(rows)
    assert result.seconds > 0
    for s, row, got in zip(advance, rows, result.rows, strict=True):
        assert got.error is None
        s.done += len(row.tokens)
        s.tokens += got.tokens
