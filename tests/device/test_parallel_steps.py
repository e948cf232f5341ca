"""What rank 0 tells the other ranks, and which models they refuse to share."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import tiny_llama, tiny_model

from kernels.model_info import describe
from kernels.parallel import check_divisible, decode_step, encode_step
from protocol.errors import ConfigError, InternalError
from protocol.step import CopyKind, PageCopy, StepRow
from protocol.types import SamplingParams, TicketId

TOKENS = st.lists(st.integers(0, 1 << 20), min_size=1, max_size=20)


@st.composite
def rows(draw: st.DrawFn) -> StepRow:
    asked = draw(st.none() | st.integers(0, 5))
    return StepRow(
        TicketId(draw(st.text(max_size=5))),
        draw(TOKENS),
        draw(st.integers(0, 1 << 40)),
        draw(TOKENS),
        draw(st.sampled_from([None, SamplingParams(3, temperature=1.0, seed=9)])),
        draw(st.integers(0, 99)),
        tuple(range(draw(st.integers(1, 4)))),
        draw(TOKENS) if asked is not None else (),
        draw(st.integers(0, 99)),
        asked,
    )


def plain(row: StepRow, name: str) -> object:
    """A field of a row; sequences as lists, whatever they are."""
    value = getattr(row, name)
    return value if isinstance(value, int) else list(value)


COPIES = st.builds(
    PageCopy, st.sampled_from(CopyKind), st.integers(0, 1 << 33), st.integers(0, 1 << 33)
)


# Drawing a row of ten fields is slow on a machine that does other things too.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@patient
@given(st.lists(rows(), max_size=6), st.lists(COPIES, max_size=4))
def test_another_rank_reads_the_same_step(sent: list[StepRow], copies: list[PageCopy]) -> None:
    got, got_copies = decode_step(encode_step(sent, copies))
    assert got_copies == copies
    assert len({row.ticket_id for row in got}) == len(sent) == len(got)
    for ours, theirs in zip(sent, got, strict=True):
        assert (ours.sample is None) == (theirs.sample is None)
        assert len(theirs.choices) == len(ours.choices)
        for name in ("tokens", "start", "pages", "token_index", "history", "n_prompt"):
            assert plain(theirs, name) == plain(ours, name), name
        assert theirs.prompt_logprobs == ours.prompt_logprobs


@patient
@given(st.lists(rows(), min_size=1, max_size=3), st.data())
def test_bytes_that_are_no_step_are_refused(sent: list[StepRow], data: st.DataObject) -> None:
    whole = encode_step(sent, [])
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    with pytest.raises(InternalError):
        decode_step(cut)
    with pytest.raises(InternalError):
        decode_step(whole + bytes(8))


def test_ranks_that_cannot_share_the_heads_are_refused_with_the_numbers(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "m", heads=6, kv_heads=3, hidden=96)
    described = describe(folder, "float32", None)
    check_divisible(described, 3)
    with pytest.raises(ConfigError, match=r"6 heads and 3 KV heads.*2 ranks"):
        check_divisible(described, 2)


def test_a_family_that_transformers_cannot_cut_is_refused(tmp_path: Path) -> None:
    described = describe(tiny_model(tmp_path / "gpt2", "gpt2"), "float32", None)
    with pytest.raises(ConfigError, match="no plan for cutting gpt2"):
        check_divisible(described, 2)
