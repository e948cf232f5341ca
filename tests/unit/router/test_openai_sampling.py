"""The sampling fields of both endpoints: every one read as it is meant, every wrong one named."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import InvalidArgument
from protocol.messages import Open
from protocol.types import Grammar, GrammarKind, Peer, Ticket, TicketId
from protocol.wire.convert import ROUTER_FRAMES
from router.openai_types import chat_call, completion_call
from router.params import Intake, ModelLimits

TEXT = (completion_call, {"prompt": "a"})
CHAT = (chat_call, {"messages": [{"role": "user", "content": "hi"}]})
BOTH = (TEXT, CHAT)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
WRAPPED = {"name": "it", "strict": True, "schema": SCHEMA, "description": "what it is"}
JSON_SCHEMA = {"type": "json_schema", "json_schema": WRAPPED}


@pytest.mark.parametrize(
    ("field", "value", "name", "read"),
    [
        ("n", 3, "n", 3),
        ("min_p", 0.25, "min_p", 0.25),
        ("presence_penalty", -0.5, "presence_penalty", -0.5),
        ("frequency_penalty", 2, "frequency_penalty", 2.0),
        ("repetition_penalty", 1.1, "repetition_penalty", 1.1),
        ("logit_bias", {"50": -100, "7": 1.5}, "logit_bias", ((7, 1.5), (50, -100.0))),
        ("logit_bias", {}, "logit_bias", ()),
        ("min_tokens", 4, "min_tokens", 4),
        ("stop_token_ids", [2, 3], "stop_token_ids", (2, 3)),
        ("prompt_logprobs", 0, "prompt_logprobs", 0),
    ],
)
def test_what_both_endpoints_read_alike(field, value, name, read):
    for call, body in BOTH:
        assert getattr(call(body | {field: value}).asked, name) == read
        assert not getattr(call(body | {field: None}).asked, name)


def test_logprobs_are_a_number_in_one_endpoint_and_two_fields_in_the_other():
    call, body = TEXT
    assert call(body).asked.logprobs is None
    assert call(body | {"logprobs": False}).asked.logprobs is None
    assert call(body | {"logprobs": 0}).asked.logprobs == 0
    assert call(body | {"logprobs": 5}).asked.logprobs == 5
    call, body = CHAT
    assert call(body | {"logprobs": False, "top_logprobs": 0}).asked.logprobs is None
    assert call(body | {"logprobs": True}).asked.logprobs == 0
    assert call(body | {"logprobs": True, "top_logprobs": 2}).asked.logprobs == 2
    assert call(body | {"logprobs": True}).asked.logprobs_field == "top_logprobs"


def test_echo_is_of_completions():
    assert completion_call({"prompt": "a", "echo": True, "max_tokens": 0}).asked.echo
    with pytest.raises(InvalidArgument) as caught:
        chat_call(CHAT[1] | {"echo": True})
    assert caught.value.field == "echo"


def test_best_of_n_is_n():
    for call, body in BOTH:
        assert call(body | {"best_of": 2, "n": 2}).asked.n == 2
        for best_of, n in ((3, 2), (1, 2)):
            with pytest.raises(InvalidArgument) as caught:
                call(body | {"best_of": best_of, "n": n})
            assert caught.value.field == "best_of"


KIND = GrammarKind


@pytest.mark.parametrize(
    ("fields", "grammar", "field"),
    [
        ({}, None, "response_format"),
        ({"response_format": {"type": "text"}}, None, "response_format"),
        (
            {"response_format": {"type": "json_object"}},
            Grammar(KIND.JSON_OBJECT),
            "response_format",
        ),
        (
            {"response_format": JSON_SCHEMA},
            Grammar(KIND.JSON_SCHEMA, json.dumps(SCHEMA)),
            "response_format.json_schema.schema",
        ),
        ({"guided_json": SCHEMA}, Grammar(KIND.JSON_SCHEMA, json.dumps(SCHEMA)), "guided_json"),
        (
            {"guided_json": json.dumps(SCHEMA)},
            Grammar(KIND.JSON_SCHEMA, json.dumps(SCHEMA)),
            "guided_json",
        ),
        ({"guided_regex": "a+"}, Grammar(KIND.REGEX, "a+"), "guided_regex"),
        ({"guided_choice": ["a", "é"]}, Grammar(KIND.CHOICE, '["a", "\\u00e9"]'), "guided_choice"),
        ({"guided_grammar": "start: /a/"}, Grammar(KIND.LARK, "start: /a/"), "guided_grammar"),
        (
            {"structured_outputs": {"json": SCHEMA, "regex": None}},
            Grammar(KIND.JSON_SCHEMA, json.dumps(SCHEMA)),
            "structured_outputs.json",
        ),
        (
            {"structured_outputs": {"regex": "a"}},
            Grammar(KIND.REGEX, "a"),
            "structured_outputs.regex",
        ),
        (
            {"structured_outputs": {"choice": ["x"]}, "response_format": {"type": "text"}},
            Grammar(KIND.CHOICE, '["x"]'),
            "structured_outputs.choice",
        ),
        (
            {"structured_outputs": {"grammar": "start: /a/"}},
            Grammar(KIND.LARK, "start: /a/"),
            "structured_outputs.grammar",
        ),
        (
            {"structured_outputs": {"json_object": True}},
            Grammar(KIND.JSON_OBJECT),
            "structured_outputs.json_object",
        ),
    ],
)
def test_every_way_to_ask_for_a_form(fields, grammar, field):
    for call, body in BOTH:
        asked = call(body | fields).asked
        assert (asked.grammar, asked.grammar_field) == (grammar, field)


def form(**changes):
    return {"response_format": {"type": "json_schema", "json_schema": WRAPPED | changes}}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        *(({name: value}, name) for name in ("n", "min_tokens") for value in ("1", 1.5, True)),
        ({"best_of": "x"}, "best_of"),
        ({"min_p": "x"}, "min_p"),
        ({"presence_penalty": True}, "presence_penalty"),
        ({"repetition_penalty": [1]}, "repetition_penalty"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {" 1": 1}}, "logit_bias"),
        ({"logit_bias": {"\u0663": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"\ud800": 1}}, "logit_bias"),
        ({"logit_bias": {"1": "x"}}, "logit_bias"),
        ({"logit_bias": {"1": True}}, "logit_bias"),
        ({"logit_bias": {"1": 10**400}}, "logit_bias"),
        ({"stop_token_ids": 2}, "stop_token_ids"),
        ({"stop_token_ids": ["2"]}, "stop_token_ids"),
        ({"stop_token_ids": [True]}, "stop_token_ids"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "\ud800"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (form(name=None), "response_format.json_schema.name"),
        (form(name="a b"), "response_format.json_schema.name"),
        (form(strict="yes"), "response_format.json_schema.strict"),
        (form(schema=None), "response_format.json_schema.schema"),
        (form(schema="{}"), "response_format.json_schema.schema"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_regex": ["a"]}, "guided_regex"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice"),
        ({"guided_choice": ["a"] * 2000}, "guided_choice"),
        ({"guided_grammar": 5}, "guided_grammar"),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ({"structured_outputs": {"\ud800": "x"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"response_format": JSON_SCHEMA, "guided_regex": "a"}, "guided_regex"),
        ({"guided_json": "[" * 100_000}, "guided_json"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_what_is_wrong_is_named(fields, field):
    for call, body in BOTH:
        with pytest.raises(InvalidArgument) as caught:
            call(body | fields)
        assert caught.value.field == field
        caught.value.message.encode()
        assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    ("endpoint", "fields", "field"),
    [
        (TEXT, {"logprobs": True}, "logprobs"),
        (TEXT, {"logprobs": "1"}, "logprobs"),
        (TEXT, {"echo": 1}, "echo"),
        (TEXT, {"top_logprobs": 1}, "top_logprobs"),
        (CHAT, {"logprobs": 1}, "logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": True}, "top_logprobs"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"top_logprobs": 10**4000, "logprobs": False}, "top_logprobs"),
    ],
)
def test_what_is_wrong_at_one_endpoint_is_named(endpoint, fields, field):
    call, body = endpoint
    with pytest.raises(InvalidArgument) as caught:
        call(body | fields)
    assert caught.value.field == field


FIELDS = (
    *("n", "best_of", "logprobs", "top_logprobs", "prompt_logprobs", "echo", "min_p", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "stop"),
    *("stop_token_ids", "response_format", "structured_outputs", "guided_json", "guided_regex"),
    *("guided_choice", "guided_grammar", "max_tokens", "temperature", "top_p", "top_k", "seed"),
)
NAMES = st.sampled_from(
    [*("type", "json_schema", "schema", "name", "strict", "json", "regex", "choice", "grammar")]
) | st.text(max_size=3)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(alphabet=st.characters(), max_size=4)
    | st.sampled_from(["text", "json_object", "json_schema", "{}", "5"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)
INTAKE = Intake(
    ModelLimits("tiny", 50, 100),
    draw_seed=lambda: 7,
    draw_id=lambda: "drawn",
    request_timeout_s=600,
)


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3), st.booleans())
def test_any_json_in_any_field_is_read_or_refused_never_anything_else(fields, chat):
    call, body = CHAT if chat else TEXT
    try:
        request = INTAKE.request(call(body | fields).asked, [1, 2, 3])
    except InvalidArgument as refused:
        assert refused.field is not None
        refused.message.encode()
        return
    sampling = request.sampling
    assert 1 <= sampling.max_tokens <= 97 and 1 <= request.n_choices <= 16
    assert sampling.min_tokens <= sampling.max_tokens
    ticket = Ticket(TicketId("r"), None, Peer("d", "i", "e"), (1, 2, 3), 3, sampling, n_choices=2)
    message = Open(ticket)
    assert ROUTER_FRAMES.decode(ROUTER_FRAMES.encode(message)) == message
