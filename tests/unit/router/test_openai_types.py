"""Request bodies: what is read, what is refused with its field, what is ignored."""

from __future__ import annotations

import json

import pytest

from protocol.errors import InvalidArgument
from router.json_fields import parse_json
from router.openai_types import MAX_PROMPTS, chat_call, completion_call

MESSAGES = [{"role": "user", "content": "hi"}]


def test_a_plain_completion():
    call = completion_call({"model": "m", "prompt": "hello", "max_tokens": 3, "stop": "x"})
    assert call.model == "m"
    assert call.prompts == ("hello",)
    assert call.asked.max_tokens == 3
    assert call.asked.stop == ("x",)
    assert not call.streaming.enabled


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ("a", ("a",)),
        (["a"], ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2]], ((1, 2),)),
        ([[1], "b", [2, 3]], ((1,), "b", (2, 3))),
    ],
)
def test_every_form_of_a_prompt(prompt, read):
    assert completion_call({"prompt": prompt}).prompts == read


@pytest.mark.parametrize(
    "prompt",
    [
        *(None, "", [], 5, {"a": 1}, [1, "a"], [True], [[1, True]], [1.5], [""], ["a", ""]),
        *([None], ["a"] * (MAX_PROMPTS + 1), "\ud800"),
    ],
)
def test_wrong_prompts_name_the_prompt(prompt):
    with pytest.raises(InvalidArgument) as caught:
        completion_call({"prompt": prompt})
    assert (caught.value.field or "").startswith("prompt")


def test_a_chat_with_parts_and_roles():
    call = chat_call(
        {
            "messages": [
                {"role": "developer", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "content": ""},
                {"role": "user", "content": [{"type": "text", "text": "b"}] * 2, "name": "x"},
            ],
            "max_completion_tokens": 9,
            "max_tokens": 4,
        }
    )
    assert [m["role"] for m in call.messages] == ["system", "user", "assistant", "user"]
    assert [m["content"] for m in call.messages] == ["be brief", "a", "", "bb"]
    assert call.asked.max_tokens == 9
    assert call.asked.max_tokens_field == "max_completion_tokens"


EMPTY_LAST = "messages[1].content"


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([*MESSAGES, {"role": "tool", "content": "x"}], "messages[1].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": ""}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "system", "content": ""}, {"role": "user", "content": ""}], EMPTY_LAST),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls"),
    ],
)
def test_wrong_messages_name_the_place(messages, field):
    with pytest.raises(InvalidArgument) as caught:
        chat_call({"messages": messages})
    assert caught.value.field == field


UNSUPPORTED = [
    ("best_of", 2),
    ("suffix", "end"),
    ("tools", [{"type": "function"}]),
    ("tool_choice", "required"),
    ("functions", [{}]),
    ("modalities", ["text", "audio"]),
    ("audio", {"voice": "x"}),
    ("top_logprobs", 3),
    ("bad_words", ["x"]),
    ("use_beam_search", True),
]


@pytest.mark.parametrize(("field", "value"), UNSUPPORTED)
def test_what_would_change_the_answer_is_refused_by_name(field, value):
    for read, body in ((completion_call, {"prompt": "a"}), (chat_call, {"messages": MESSAGES})):
        with pytest.raises(InvalidArgument) as caught:
            read(body | {field: value})
        assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 1),
        ("n", None),
        ("best_of", 1),
        ("echo", False),
        ("logprobs", None),
        ("logprobs", False),
        ("presence_penalty", 0.0),
        ("frequency_penalty", 0),
        ("logit_bias", {}),
        ("tools", []),
        ("tool_choice", "auto"),
        ("response_format", {"type": "text"}),
        ("user", "u-1"),
        ("metadata", {"a": "b"}),
        ("store", True),
        ("something_new", [1]),
    ],
)
def test_neutral_values_and_unknown_fields_pass(field, value):
    assert completion_call({"prompt": "a", field: value}).prompts == ("a",)
    assert chat_call({"messages": MESSAGES, field: value}).messages[0]["content"] == "hi"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", "5"),
        ("max_tokens", True),
        ("max_tokens", 5.5),
        ("temperature", "hot"),
        ("temperature", False),
        ("temperature", 10**400),
        ("top_p", [1]),
        ("top_k", 1.0),
        ("seed", "1"),
        ("stop", 5),
        ("stop", ["a", 5]),
        ("stream", "yes"),
        ("stream", 1),
        ("ignore_eos", 0),
        ("priority", "high"),
        ("user", 5),
        ("request_id", 5),
        ("model", 5),
        ("stream_options", {"include_usage": True}),
    ],
)
def test_wrong_types_name_the_field(field, value):
    with pytest.raises(InvalidArgument) as caught:
        completion_call({"prompt": "a", field: value})
    assert caught.value.field == field


def test_stream_options():
    body = {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}}
    assert completion_call(body).streaming.include_usage
    for options in (5, {"include_usage": 1}):
        with pytest.raises(InvalidArgument) as caught:
            completion_call(body | {"stream_options": options})
        assert (caught.value.field or "").startswith("stream_options")


@pytest.mark.parametrize(
    "raw",
    [
        *(b"", b"{", b"[1]", b'"a"', b"null", b"\xff\xfe\x00", b"[" * 200_000),
        *(b'{"temperature": NaN}', b'{"x": {"y": Infinity}}', b'{"top_p": -Infinity}'),
        b'{"a":' + b"9" * 5000,
    ],
)
def test_what_is_not_a_json_object_is_refused(raw):
    with pytest.raises(InvalidArgument):
        parse_json(raw)


def test_nan_names_its_field():
    with pytest.raises(InvalidArgument) as caught:
        parse_json(b'{"model": "m", "temperature": NaN}')
    assert caught.value.field == "temperature"


def test_a_field_that_could_not_be_sent_back_is_not_named():
    with pytest.raises(InvalidArgument) as caught:
        parse_json(b'{"\\ud800": NaN}')
    caught.value.message.encode()
    assert caught.value.field is None


def test_json_that_is_fine():
    body = {"a": [1, 2.5, None, "é\U0001f600"]}
    assert parse_json(json.dumps(body).encode()) == body
