"""Every sampling field in both front ends: good values reach the dispatcher, bad ones are named."""

from __future__ import annotations

import math
from collections.abc import Iterator

import grpc
import httpx
import pytest
from clients.grpc_by_reflection import ReflectedClient
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from protocol.types import Grammar, GrammarKind

INFERENCE = "tandem.v1.Inference"
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}
VOCAB = 256  # of the fake's model

# field, value in JSON, value in protobuf, attribute of SamplingParams, what it must be
GOOD = [
    ("min_p", 0.25, 0.25, "min_p", 0.25),
    ("min_p", 1, 1.0, "min_p", 1.0),
    ("presence_penalty", -2, -2.0, "presence_penalty", -2.0),
    ("presence_penalty", 2.0, 2.0, "presence_penalty", 2.0),
    ("frequency_penalty", 0.5, 0.5, "frequency_penalty", 0.5),
    ("repetition_penalty", 0.1, 0.1, "repetition_penalty", 0.1),
    ("repetition_penalty", 10, 10.0, "repetition_penalty", 10.0),
    ("logit_bias", {"7": -100, "5": 1.5}, {7: -100.0, 5: 1.5}, "logit_bias", ((5, 1.5), (7, -100))),
    ("min_tokens", 5, 5, "min_tokens", 5),
    ("min_tokens", 0, 0, "min_tokens", 0),
    ("stop_token_ids", [255, 0], [255, 0], "stop_token_ids", (255, 0)),
    ("prompt_logprobs", 0, 0, "prompt_logprobs", 0),
    ("prompt_logprobs", 20, 20, "prompt_logprobs", 20),
]
# field, value in JSON, value in protobuf (None: it cannot be said there), words of the message
BAD = [
    ("n", 0, 0, ["0", "1 to 16"]),
    ("n", 17, 17, ["17", "1 to 16"]),
    ("n", -1, -1, ["-1"]),
    ("n", 10**4000, None, ["out of range"]),
    ("min_p", -0.1, -0.1, ["-0.1", "0 to 1"]),
    ("min_p", 1.1, 1.1, ["1.1", "0 to 1"]),
    ("presence_penalty", 2.1, 2.1, ["2.1", "-2 to 2"]),
    ("presence_penalty", -9, -9.0, ["-9", "-2 to 2"]),
    ("frequency_penalty", 3, 3.0, ["3", "-2 to 2"]),
    ("repetition_penalty", 0, 0.0, ["0", "above 0"]),
    ("repetition_penalty", -1, -1.0, ["-1", "above 0"]),
    ("repetition_penalty", 5e-324, 5e-324, ["5e-324", "from 1e-06"]),
    ("repetition_penalty", 10.5, 10.5, ["10.5", "at most 10"]),
    ("logit_bias", {"256": 1}, {256: 1.0}, ["256", "0 to 255"]),
    ("logit_bias", {"5": 100.5}, {5: 100.5}, ["token 5", "100.5", "-100 to 100"]),
    ("logit_bias", {"5": -101}, {5: -101.0}, ["-101"]),
    ("min_tokens", -1, -1, ["negative"]),
    ("min_tokens", 9, 9, ["9", "max_tokens", "8"]),
    ("min_tokens", 10**4000, None, ["32"]),
    ("stop_token_ids", [256], [256], ["256", "0 to 255"]),
    ("stop_token_ids", [-1], None, ["-1", "0 to 255"]),
    ("stop_token_ids", [1] * 129, [1] * 129, ["129", "128"]),
    ("prompt_logprobs", 21, 21, ["21", "0 to 20"]),
    ("prompt_logprobs", -1, -1, ["-1", "0 to 20"]),
]
NOT_FINITE = [
    {"min_p": math.nan},
    {"presence_penalty": math.inf},
    {"frequency_penalty": math.nan},
    {"repetition_penalty": math.inf},
    {"repetition_penalty": math.nan},
    {"logit_bias": {5: math.nan}},
    {"logit_bias": {5: -math.inf}},
]
REGEX, SCHEMA = "[a-z]+", '{"type": "object"}'
# fields in JSON, `structured_output` in protobuf, the grammar
FORMS = [
    (
        {"response_format": {"type": "json_object"}},
        {"json_object": {}},
        Grammar(GrammarKind.JSON_OBJECT),
    ),
    ({"guided_json": SCHEMA}, {"json_schema": SCHEMA}, Grammar(GrammarKind.JSON_SCHEMA, SCHEMA)),
    ({"guided_regex": REGEX}, {"regex": REGEX}, Grammar(GrammarKind.REGEX, REGEX)),
    (
        {"structured_outputs": {"grammar": "start: /a/"}},
        {"lark": "start: /a/"},
        Grammar(GrammarKind.LARK, "start: /a/"),
    ),
    (
        {"guided_choice": ["a", "b"]},
        {"choice": {"texts": ["a", "b"]}},
        Grammar(GrammarKind.CHOICE, '["a", "b"]'),
    ),
]
# The same, wrong: the field named in JSON and in protobuf, and words of the message.
BAD_FORMS = [
    ({"guided_regex": "(a"}, {"regex": "(a"}, ("guided_regex", "regex"), ["regex", "compile"]),
    (
        {"structured_outputs": {"grammar": "start: missing"}},
        {"lark": "start: missing"},
        ("structured_outputs.grammar", "lark"),
        ["missing"],
    ),
    (
        {"guided_json": {"type": "no such type"}},
        {"json_schema": '{"type": "no such type"}'},
        ("guided_json", "json_schema"),
        ["no such type"],
    ),
    ({"guided_json": "{"}, {"json_schema": "{"}, ("guided_json", "json_schema"), ["JSON"]),
    ({"guided_choice": []}, {"choice": {}}, ("guided_choice", "choice.texts"), ["empty"]),
    ({"guided_regex": ""}, {"regex": ""}, ("guided_regex", "regex"), ["empty"]),
    ({"guided_regex": "a" * 140_000}, None, (None, None), []),
]


@pytest.fixture
def client(grpc_address: str) -> Iterator[ReflectedClient]:
    client = ReflectedClient(grpc_address)
    yield client
    client.close()


def ask_grpc(client: ReflectedClient, **fields: object) -> list:
    return list(client.call(INFERENCE, "Generate", {"text": "hi"} | fields, timeout=60))


def refused_grpc(client: ReflectedClient, **fields: object) -> tuple[str, str]:
    """Field and message of a refusal."""
    with pytest.raises(grpc.RpcError) as caught:
        ask_grpc(client, **fields)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    for detail in rpc_status.from_call(caught.value).details:
        bad = error_details_pb2.BadRequest()
        if detail.Unpack(bad):
            return bad.field_violations[0].field, caught.value.details()
    raise AssertionError("no field is named")


def refused_http(http: httpx.Client, path: str, body: dict) -> tuple[str, str]:
    """Field and message of a refusal."""
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.headers["x-should-retry"] == "false"
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error["param"], error["message"]


@pytest.mark.parametrize(("field", "json", "proto", "attribute", "value"), GOOD)
def test_a_good_value_reaches_the_dispatcher(
    served, http, client, field, json, proto, attribute, value
):
    asked = {"max_tokens": 8}
    for path, body in ((TEXT, {"prompt": "hi"}), (CHAT, HI)):
        assert http.post(path, json=body | asked | {field: json}).status_code == 200
    ask_grpc(client, **asked, **{field: proto})
    got = [getattr(request.sampling, attribute) for request in served.core.requests]
    assert got == [value] * 3


def test_the_number_of_choices_reaches_the_dispatcher(served, http, client):
    for path, body in ((TEXT, {"prompt": "hi"}), (CHAT, HI)):
        assert http.post(path, json=body | {"n": 16}).status_code == 200
    ask_grpc(client, n=16)
    assert [request.n_choices for request in served.core.requests] == [16] * 3


@pytest.mark.parametrize(("fields", "output", "grammar"), FORMS)
def test_a_form_reaches_the_dispatcher(served, http, client, fields, output, grammar):
    for path, body in ((TEXT, {"prompt": "hi"}), (CHAT, HI)):
        assert http.post(path, json=body | fields).status_code == 200
    ask_grpc(client, structured_output=output)
    assert [request.sampling.grammar for request in served.core.requests] == [grammar] * 3


@pytest.mark.parametrize(("field", "json", "proto", "words"), BAD)
def test_a_bad_value_is_named_and_reaches_nobody(served, http, client, field, json, proto, words):
    asked = {"max_tokens": 8}
    refusals = [
        refused_http(http, path, body | asked | {field: json})
        for path, body in ((TEXT, {"prompt": "hi"}), (CHAT, HI))
    ]
    if proto is not None:
        refusals.append(refused_grpc(client, **asked, **{field: proto}))
    for param, message in refusals:
        assert param == field
        for word in (field, *words):
            assert word in message
    assert served.core.requests == []


@pytest.mark.parametrize("fields", NOT_FINITE)
def test_what_is_not_finite_is_named(served, client, fields):
    (field,) = fields
    assert refused_grpc(client, **fields)[0] == field
    assert served.core.requests == []


@pytest.mark.parametrize(("fields", "output", "named", "words"), BAD_FORMS)
def test_a_form_that_cannot_be_followed_is_named(
    served, http, client, fields, output, named, words
):
    if output is None:
        assert http.post(TEXT, json={"prompt": "hi"} | fields).status_code == 413
        return
    for path, body in ((TEXT, {"prompt": "hi"}), (CHAT, HI)):
        param, message = refused_http(http, path, body | fields)
        assert param == named[0]
        assert all(word in message for word in words)
    param, message = refused_grpc(client, structured_output=output)
    assert param == f"structured_output.{named[1]}"
    assert all(word in message for word in words)
    assert served.core.requests == []


def test_what_contradicts_itself_is_named(served, http, client):
    form = {"guided_regex": REGEX}
    assert refused_http(http, TEXT, {"prompt": "hi", "ignore_eos": True} | form)[0] == "ignore_eos"
    assert refused_grpc(client, ignore_eos=True, structured_output={"regex": REGEX})[0] == (
        "ignore_eos"
    )
    both = form | {"response_format": {"type": "json_object"}}
    field, message = refused_http(http, CHAT, HI | both)
    assert field == "guided_regex" and "response_format" in message
    assert refused_grpc(client, structured_output={})[0] == "structured_output"
    # The rest of the context is the bound where no max_tokens is given.
    field, message = refused_http(http, TEXT, {"prompt": "hi", "min_tokens": 511})
    assert field == "min_tokens" and "511" in message and "510" in message
    assert refused_http(http, CHAT, HI | {"top_logprobs": 3})[0] == "top_logprobs"
    assert refused_http(http, CHAT, HI | {"logprobs": True, "top_logprobs": 21})[0] == (
        "top_logprobs"
    )
    assert refused_http(http, TEXT, {"prompt": "hi", "logprobs": 21})[0] == "logprobs"
    assert refused_grpc(client, logprobs=21)[0] == "logprobs"
    assert refused_http(http, TEXT, {"prompt": "hi", "n": 2, "best_of": 3})[0] == "best_of"
    assert refused_http(http, TEXT, {"prompt": "hi", "max_tokens": 0})[0] == "max_tokens"
    assert refused_grpc(client, max_tokens=0)[0] == "max_tokens"
    assert served.core.requests == []
