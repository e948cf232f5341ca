"""Every bound of every sampling field, the context arithmetic, and what is filled in."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ContextLengthExceeded, InvalidArgument, ModelNotFound
from protocol.types import Grammar, GrammarKind, SamplingParams
from router.bounds import MAX_STOPS
from router.params import (
    Asked,
    Intake,
    ModelLimits,
    chat_role,
    check_conversation,
    check_request_id,
    check_text,
)

CONTEXT = 100
VOCAB = 50


def intake(room_tokens: int | None = None) -> Intake:
    return Intake(
        ModelLimits("tiny", VOCAB, CONTEXT, room_tokens),
        draw_seed=lambda: 77,
        draw_id=lambda: "drawn",
        request_timeout_s=600,
    )


def test_what_is_left_out_gets_the_documented_defaults():
    request = intake().request(Asked(), [1, 2, 3])
    assert request.request_id == "drawn"
    assert request.sampling.max_tokens == CONTEXT - 3
    assert request.sampling.temperature == 1.0
    assert request.sampling.top_p == 1.0
    assert request.sampling.top_k == 0
    assert request.sampling.seed == 77
    assert request.deadline_s == 600
    assert request.skip_special_tokens
    assert not request.sampling.ignore_eos


def test_what_is_given_is_kept():
    asked = Asked(
        max_tokens=5,
        temperature=0.25,
        top_p=0.5,
        top_k=7,
        seed=11,
        stop=("x", "yy"),
        include_stop_str_in_output=True,
        ignore_eos=True,
        skip_special_tokens=False,
        priority=-3,
        request_id="mine",
        deadline_s=2.5,
    )
    request = intake().request(asked, [4, 5])
    assert request.prompt == (4, 5)
    assert request.request_id == "mine"
    assert (request.sampling.temperature, request.sampling.top_p) == (0.25, 0.5)
    assert (request.sampling.max_tokens, request.sampling.top_k, request.sampling.seed) == (
        5,
        7,
        11,
    )
    assert request.stop == ("x", "yy")
    assert request.include_stop_str_in_output and request.sampling.ignore_eos
    assert not request.skip_special_tokens
    assert request.priority == -3
    assert request.deadline_s == 2.5


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (Asked(max_tokens=0), "max_tokens"),
        (Asked(max_tokens=-1), "max_tokens"),
        (Asked(max_tokens=10**4300 - 1), "max_tokens"),
        (Asked(max_tokens=-1, max_tokens_field="max_completion_tokens"), "max_completion_tokens"),
        (Asked(temperature=math.nan), "temperature"),
        (Asked(temperature=math.inf), "temperature"),
        (Asked(temperature=-0.1), "temperature"),
        (Asked(temperature=2.01), "temperature"),
        (Asked(top_p=0.0), "top_p"),
        (Asked(top_p=1.01), "top_p"),
        (Asked(top_p=math.nan), "top_p"),
        (Asked(top_k=-2), "top_k"),
        (Asked(seed=1 << 63), "seed"),
        (Asked(seed=-(1 << 63) - 1), "seed"),
        (Asked(priority=1 << 31), "priority"),
        (Asked(request_id=""), "request_id"),
        (Asked(request_id="two words"), "request_id"),
        (Asked(request_id="line\nbreak"), "request_id"),
        (Asked(request_id="x" * 129), "request_id"),
        (Asked(stop=("",)), "stop"),
        (Asked(stop=("\ud800",)), "stop"),
        (Asked(stop=("x" * 2000,)), "stop"),
        (Asked(stop=tuple(f"s{i}" for i in range(MAX_STOPS + 1))), "stop"),
    ],
)
def test_a_wrong_value_names_its_field(asked: Asked, field: str):
    with pytest.raises(InvalidArgument) as caught:
        intake().request(asked, [1])
    assert caught.value.field == field
    assert field in caught.value.message


@pytest.mark.parametrize(
    "asked",
    [
        Asked(temperature=0.0),
        Asked(temperature=2.0),
        Asked(top_p=1e-9),
        Asked(top_k=-1),
        Asked(top_k=0),
        Asked(seed=-(1 << 63)),
        Asked(seed=(1 << 63) - 1),
        Asked(stop=tuple(f"s{i}" for i in range(MAX_STOPS))),
        Asked(max_tokens=CONTEXT - 1),
    ],
)
def test_the_bounds_themselves_are_allowed(asked: Asked):
    assert intake().request(asked, [1]).prompt == (1,)


def test_prompts_must_hold_tokens_of_the_vocabulary():
    for wrong in ([], [VOCAB], [-1], [0, 3, VOCAB]):
        with pytest.raises(InvalidArgument) as caught:
            intake().request(Asked(), wrong, "prompt[1]")
        assert caught.value.field == "prompt[1]"
    assert intake().request(Asked(), [0, VOCAB - 1]).prompt == (0, VOCAB - 1)


def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers():
    for n_prompt in (CONTEXT, CONTEXT + 1):
        with pytest.raises(ContextLengthExceeded) as caught:
            intake().request(Asked(), [1] * n_prompt)
        assert str(n_prompt) in caught.value.message and str(CONTEXT) in caught.value.message


def test_an_answer_beyond_the_context_is_refused_with_the_numbers():
    with pytest.raises(ContextLengthExceeded) as caught:
        intake().request(Asked(max_tokens=71), [1] * 30)
    for number in ("30", "71", "101", "100"):
        assert number in caught.value.message
    assert caught.value.field == "max_tokens"
    assert intake().request(Asked(max_tokens=70), [1] * 30).sampling.max_tokens == 70


def test_the_default_answer_fits_the_largest_worker():
    assert intake(room_tokens=40).request(Asked(), [1] * 30).sampling.max_tokens == 10
    # A given count is not bent: the dispatcher refuses it with the workers' numbers.
    assert intake(room_tokens=40).request(Asked(max_tokens=60), [1]).sampling.max_tokens == 60
    assert intake(room_tokens=40).request(Asked(), [1] * 50).sampling.max_tokens == 1


@given(
    n_prompt=st.integers(1, CONTEXT - 1),
    pages=st.integers(1, 60),
    page_size=st.sampled_from([1, 4, 16]),
    n=st.integers(1, 16),
)
def test_the_default_is_the_longest_answer_that_all_choices_have_room_for(
    n_prompt: int, pages: int, page_size: int, n: int
):
    def needed(max_tokens: int) -> int:
        whole, shared = -(-(n_prompt + max_tokens) // page_size), n_prompt // page_size
        return shared + n * (whole - shared)

    taken = intake()
    taken.limits = replace(taken.limits, room_tokens=pages * page_size, page_size=page_size)
    longest = taken.request(Asked(n=n), [1] * n_prompt).sampling.max_tokens
    assert needed(longest) <= pages or longest == 1
    assert needed(longest + 1) > pages or n_prompt + longest == CONTEXT


@given(
    n_prompt=st.integers(1, CONTEXT - 1),
    room=st.none() | st.integers(1, 2 * CONTEXT),
    asked=st.none() | st.integers(1, 2 * CONTEXT),
)
def test_no_accepted_request_overflows_the_context(n_prompt: int, room: int | None, asked):
    try:
        request = intake(room).request(Asked(max_tokens=asked), [1] * n_prompt)
    except ContextLengthExceeded:
        assert asked is not None and n_prompt + asked > CONTEXT
        return
    assert 1 <= request.sampling.max_tokens <= CONTEXT - n_prompt


def test_a_temperature_too_small_to_divide_by_is_greedy_and_top_k_of_all_is_off():
    request = intake().request(Asked(temperature=1e-300, top_k=VOCAB, seed=-1), [1])
    assert request.sampling.temperature == 0.0
    assert request.sampling.top_k == 0
    assert 0 <= request.sampling.seed < 1 << 63


def test_a_deadline_may_shorten_the_configured_one_only():
    assert intake().request(Asked(deadline_s=9999), [1]).deadline_s == 600
    assert intake().request(Asked(deadline_s=1), [1]).deadline_s == 1


def test_models():
    intake().check_model("tiny")
    intake().check_model(None)
    intake().check_model("")
    with pytest.raises(ModelNotFound) as caught:
        intake().check_model("huge")
    assert "huge" in caught.value.message and "tiny" in caught.value.message


def test_texts_roles_and_ids():
    check_text("é", "prompt")
    for wrong in ("", "a\udfffb"):
        with pytest.raises(InvalidArgument):
            check_text(wrong, "prompt")
    assert chat_role("developer", "r") == "system"
    for role in ("tool", "USER", None, 3, ["user"]):
        with pytest.raises(InvalidArgument):
            chat_role(role, "messages[0].role")
    check_request_id("a-b.c:d/1")


def test_a_conversation_needs_one_message_with_content():
    empty, full = {"role": "system", "content": ""}, {"role": "user", "content": "hi"}
    for messages in ([full], [empty, full], [full, empty], [{"role": "user", "content": " "}]):
        check_conversation(messages, "messages")
    for n_empty in (1, 2):
        with pytest.raises(InvalidArgument) as caught:
            check_conversation([empty] * n_empty, "chat.messages")
        assert caught.value.field == f"chat.messages[{n_empty - 1}].content"


def test_a_prompt_that_is_too_long_is_refused_before_its_ids_are_looked_at():
    with pytest.raises(ContextLengthExceeded):
        intake().request(Asked(), [-1] * 10_000)


def test_everything_else_that_is_given_is_kept_too():
    grammar = Grammar(GrammarKind.REGEX, "a+")
    asked = Asked(
        max_tokens=6,
        n=3,
        min_p=0.5,
        presence_penalty=-1.0,
        frequency_penalty=1.5,
        repetition_penalty=1.25,
        logit_bias=((3, -4.0),),
        min_tokens=2,
        stop_token_ids=(9,),
        logprobs=4,
        grammar=grammar,
    )
    request = intake().request(asked, [1, 2])
    assert request.n_choices == 3 and not request.echo and not request.prompt_only
    assert request.sampling == SamplingParams(
        max_tokens=6,
        temperature=1.0,
        seed=77,
        min_p=0.5,
        presence_penalty=-1.0,
        frequency_penalty=1.5,
        repetition_penalty=1.25,
        logit_bias=((3, -4.0),),
        min_tokens=2,
        stop_token_ids=(9,),
        logprobs=4,
        grammar=grammar,
    )


def test_an_echo_of_no_tokens_asks_the_engine_for_one():
    asked = Asked(max_tokens=0, echo=True, logprobs=2, prompt_logprobs=1, stop=("x",), n=2)
    request = intake().request(asked, [1, 2])
    assert request.echo and request.prompt_only and request.n_choices == 2 and request.stop == ()
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.logprobs, sampling.prompt_logprobs) == (1, 2, 2)
    assert intake().request(Asked(echo=True), [1, 2]).sampling.prompt_logprobs is None
    assert intake().request(Asked(logprobs=3), [1, 2]).sampling.prompt_logprobs is None


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (Asked(prompt_logprobs=20, n=16), "prompt_logprobs"),
        (Asked(echo=True, logprobs=20, n=16, logprobs_field="mine"), "mine"),
    ],
)
def test_too_many_prompt_logprobs_are_refused_with_the_numbers(asked: Asked, field: str):
    roomy = intake()
    roomy.limits = replace(roomy.limits, max_model_len=10_000)
    roomy.request(asked, [1] * 595)
    with pytest.raises(InvalidArgument, match="201600") as caught:
        roomy.request(asked, [1] * 600)
    assert caught.value.field == field


def test_the_shortest_answer_may_not_be_longer_than_the_longest():
    with pytest.raises(InvalidArgument, match="more than max_tokens, which is 97") as caught:
        intake().request(Asked(min_tokens=98), [1, 2, 3])
    assert caught.value.field == "min_tokens"
    assert intake().request(Asked(min_tokens=97), [1, 2, 3]).sampling.min_tokens == 97


def test_a_grammar_is_refused_in_the_compilers_words():
    made = Intake(
        ModelLimits("tiny", VOCAB, CONTEXT),
        draw_seed=lambda: 77,
        draw_id=lambda: "drawn",
        request_timeout_s=600,
        check_grammar=lambda grammar: None if grammar.text == "good" else "no such rule",
    )
    made.check_grammar(Asked())
    made.check_grammar(Asked(grammar=Grammar(GrammarKind.LARK, "good")))
    with pytest.raises(InvalidArgument, match="guided_grammar: no such rule") as caught:
        made.check_grammar(
            Asked(grammar=Grammar(GrammarKind.LARK, "bad"), grammar_field="guided_grammar")
        )
    assert caught.value.field == "guided_grammar"
