"""The gRPC front, seen by a client that learned everything by reflection."""

from __future__ import annotations

import math
from collections.abc import Iterator

import grpc
import pytest
from clients.fake_core import ANSWER
from clients.grpc_by_reflection import ReflectedClient
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from router.grpc_sampling import LAST_WORD_S, before

INFERENCE, ADMIN = "tandem.v1.Inference", "tandem.v1.Admin"


@pytest.fixture
def client(grpc_address: str) -> Iterator[ReflectedClient]:
    client = ReflectedClient(grpc_address)
    yield client
    client.close()


def generate(
    client: ReflectedClient, timeout: float | None = 60, **fields
) -> tuple[str, list, object]:
    """Text, token ids and the ``complete`` of one whole answer."""
    text, tokens, complete = "", [], None
    for event in client.call(INFERENCE, "Generate", fields, timeout=timeout):
        assert complete is None, "nothing may follow complete"
        if event.WhichOneof("event") == "chunk":
            assert event.chunk.index == len(tokens)
            text += event.chunk.text
            tokens += event.chunk.token_ids
        else:
            complete = event.complete
    return text, tokens, complete


def details(error: grpc.RpcError) -> dict:
    """What ``google.rpc.Status`` says: reason, retry seconds, field."""
    found: dict = {}
    for detail in rpc_status.from_call(error).details:
        for kind in (error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo):
            message = kind()
            if detail.Unpack(message):
                found[kind.__name__] = message
        bad = error_details_pb2.BadRequest()
        if detail.Unpack(bad):
            found["field"] = bad.field_violations[0].field
    return found


def test_reflection_lists_what_is_served(client: ReflectedClient):
    assert {INFERENCE, ADMIN, "grpc.health.v1.Health"} <= set(client.services())


def test_a_stream_of_chunks_and_one_end(client: ReflectedClient):
    asked = {"text": "Once upon a time", "max_tokens": 12, "temperature": 0.0}
    text, tokens, complete = generate(client, **asked)
    assert text
    assert complete.usage.completion_tokens == len(tokens) <= 12
    assert complete.finish_reason in (1, 2)
    assert generate(client, **asked)[0] == text


def test_http_and_grpc_give_the_same_text(client, http, model):
    asked = {"max_tokens": 16, "temperature": 0.0}
    whole = http.post("/v1/completions", json={"model": model, "prompt": "Hello", **asked}).json()
    text, _, complete = generate(client, text="Hello", **asked)
    assert text == whole["choices"][0]["text"]
    assert complete.usage.completion_tokens == whole["usage"]["completion_tokens"]
    assert complete.usage.prompt_tokens == whole["usage"]["prompt_tokens"]


def test_the_three_kinds_of_input_agree(client: ReflectedClient):
    ids = client.call(INFERENCE, "Tokenize", {"text": "Hello there"}).token_ids
    back = client.call(INFERENCE, "Detokenize", {"token_ids": ids, "skip_special_tokens": True})
    assert back.text == "Hello there"
    asked = {"max_tokens": 8, "temperature": 0.0}
    by_text = generate(client, text="Hello there", **asked)
    by_ids = generate(client, token_ids={"ids": ids}, **asked)
    assert by_text[:2] == by_ids[:2]
    chat = {"messages": [{"role": "user", "content": "Hello there"}]}
    chat_ids = client.call(INFERENCE, "Tokenize", {"chat": chat}).token_ids
    assert (
        generate(client, chat=chat, **asked)[1]
        == (generate(client, token_ids={"ids": chat_ids}, **asked)[1])
    )


def test_the_model_is_listed(client: ReflectedClient, model: str):
    (served_model,) = client.call(INFERENCE, "ListModels", {}).models
    assert served_model.id == model
    assert served_model.max_model_len > 1 and served_model.vocab_size > 1


def test_fields_reach_the_dispatcher(served, client):
    generate(
        client,
        text="hi",
        max_tokens=3,
        temperature=0.5,
        top_p=0.25,
        top_k=4,
        seed=-1,
        ignore_eos=True,
        priority=-2,
        request_id="mine",
        skip_special_tokens=False,
        timeout=30,
    )
    generate(client, text="hi", timeout=None)
    named, plain = served.core.requests
    sampling = named.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (3, 0.5, 0.25)
    assert (sampling.top_k, sampling.seed, sampling.ignore_eos) == (4, (1 << 63) - 1, True)
    assert (named.priority, named.request_id, named.skip_special_tokens) == (-2, "mine", False)
    assert 20 < named.deadline_s < 31  # grpc rounds up
    assert plain.deadline_s == 600
    assert plain.sampling.temperature == 1.0
    assert plain.sampling.max_tokens == 512 - 2
    assert plain.skip_special_tokens


def test_a_stop_string_is_told(served, client):
    text, tokens, complete = generate(client, text="hi", stop=["Two.", "never"])
    assert text == ANSWER[: ANSWER.index("Two.")]
    assert complete.matched_stop == "Two."
    assert complete.finish_reason == 1
    assert complete.usage.completion_tokens == len(tokens)
    text, _, complete = generate(client, text="hi", max_tokens=2, include_stop_str_in_output=True)
    assert not complete.HasField("matched_stop")
    assert complete.finish_reason == 2
    assert complete.timings[0].stage == "prefill"


EMPTY_CHAT = {"messages": [{"role": "system"}, {"role": "user", "content": ""}]}
CHAT_ROBOT = {"messages": [{"role": "robot", "content": "x"}]}
BAD = [
    ({}, "INVALID_ARGUMENT", "input", []),
    ({"model": "gpt-9", "text": "hi"}, "NOT_FOUND", "model", ["gpt-9"]),
    ({"text": ""}, "INVALID_ARGUMENT", "text", ["empty"]),
    ({"chat": {}}, "INVALID_ARGUMENT", "chat.messages", ["empty"]),
    ({"chat": EMPTY_CHAT}, "INVALID_ARGUMENT", "chat.messages[1].content", ["empty"]),
    ({"chat": CHAT_ROBOT}, "INVALID_ARGUMENT", "chat.messages[0].role", ["robot"]),
    ({"token_ids": {}}, "INVALID_ARGUMENT", "token_ids", ["empty"]),
    ({"token_ids": {"ids": [1 << 31]}}, "INVALID_ARGUMENT", "token_ids", ["2147483648"]),
    ({"text": "hi", "max_tokens": -1}, "INVALID_ARGUMENT", "max_tokens", ["-1"]),
    ({"text": "hi", "max_tokens": 0}, "INVALID_ARGUMENT", "max_tokens", ["0"]),
    ({"text": "hi", "temperature": math.nan}, "INVALID_ARGUMENT", "temperature", ["nan"]),
    ({"text": "hi", "temperature": math.inf}, "INVALID_ARGUMENT", "temperature", ["inf"]),
    ({"text": "hi", "temperature": -1}, "INVALID_ARGUMENT", "temperature", ["-1"]),
    ({"text": "hi", "top_p": 0}, "INVALID_ARGUMENT", "top_p", []),
    ({"text": "hi", "top_p": math.nan}, "INVALID_ARGUMENT", "top_p", []),
    ({"text": "hi", "top_k": -2}, "INVALID_ARGUMENT", "top_k", []),
    ({"text": "hi", "stop": [""]}, "INVALID_ARGUMENT", "stop", []),
    ({"text": "hi", "stop": ["x"] * 17}, "INVALID_ARGUMENT", "stop", ["17"]),
    ({"text": "hi", "request_id": "a b"}, "INVALID_ARGUMENT", "request_id", []),
]
# The same, with the fake model's own numbers.
BAD_HERE = [
    ({"text": "x" * 600}, "INVALID_ARGUMENT", "text", ["600", "512"]),
    ({"text": "x" * 9000}, "INVALID_ARGUMENT", "text", ["9000", "512"]),
    ({"text": "x" * 99, "max_tokens": 500}, "INVALID_ARGUMENT", "max_tokens", ["99", "500", "512"]),
    ({"text": "x" * 200_000}, "INVALID_ARGUMENT", None, ["100000"]),
]
CASES = ("fields", "code", "field", "words")


def check_refusal(client: ReflectedClient, fields: dict, code: str, field, words: list) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        generate(client, **fields)
    assert caught.value.code().name == code
    found = details(caught.value)
    assert found["ErrorInfo"].domain == "tandem"
    assert found.get("field") == field
    assert "RetryInfo" not in found
    for word in words:
        assert word in caught.value.details()


@pytest.mark.parametrize(CASES, BAD)
def test_bad_input_is_named_and_harms_nobody(client, fields, code, field, words):
    check_refusal(client, fields, code, field, words)
    _, tokens, _ = generate(client, text="hi", max_tokens=2, ignore_eos=True)
    assert len(tokens) == 2


@pytest.mark.parametrize(CASES, BAD + BAD_HERE)
def test_bad_input_never_reaches_the_dispatcher(served, client, fields, code, field, words):
    check_refusal(client, fields, code, field, words)
    assert served.core.requests == []


def test_reasons_are_stable_words(served, client):
    def reason(**fields) -> str:
        with pytest.raises(grpc.RpcError) as caught:
            generate(client, **fields)
        return details(caught.value)["ErrorInfo"].reason

    assert reason(text="hi", model="x") == "MODEL_NOT_FOUND"
    assert reason(text="x" * 600) == "CONTEXT_LENGTH_EXCEEDED"
    assert reason(text="x" * 200_000) == "REQUEST_TOO_LARGE"
    assert reason(text="bug-first") == "INTERNAL"
    assert reason(text="full-first") == "OVERLOADED"


def test_other_calls_refuse_bad_input_too(served, client):
    for method, fields in (
        ("Tokenize", {}),
        ("Tokenize", {"text": "hi", "model": "x"}),
        ("Tokenize", {"chat": CHAT_ROBOT}),
        ("Detokenize", {"token_ids": [256]}),
        ("Detokenize", {"token_ids": [65] * 5000}),
        ("Detokenize", {"token_ids": [1], "model": "x"}),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            client.call(INFERENCE, method, fields)
        assert caught.value.code().name in ("INVALID_ARGUMENT", "NOT_FOUND")
    assert client.call(INFERENCE, "Detokenize", {}).text == ""
    assert list(client.call(INFERENCE, "Tokenize", {"text": ""}).token_ids) == []


@pytest.mark.parametrize("place", ["first", "later"])
def test_a_failure_says_when_a_repeat_can_help(served, client, place):
    with pytest.raises(grpc.RpcError) as caught:
        generate(client, text=f"fail-{place}")
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    found = details(caught.value)
    assert found["ErrorInfo"].reason == "UNAVAILABLE"
    assert found["RetryInfo"].retry_delay.ToMilliseconds() == 2500


def test_a_bug_is_an_incident_without_its_words(served, client):
    with pytest.raises(grpc.RpcError) as caught:
        generate(client, text="bug-later")
    assert caught.value.code() == grpc.StatusCode.INTERNAL
    assert "incident" in caught.value.details()
    assert "secret" not in str(rpc_status.from_call(caught.value))


@pytest.mark.parametrize("place", ["first", "later"])
def test_hanging_up_cancels_the_answer(served, client, place):
    stream = client.call(INFERENCE, "Generate", {"text": f"hold-{place}"})
    assert served.core.wait_for(lambda: served.core.requests)
    if place == "later":
        assert next(stream).chunk.text
    stream.cancel()
    assert served.core.wait_for(lambda: len(served.core.cancelled) == 1)


def test_a_deadline_ends_the_answer_with_our_own_sentence(served, client):
    for timeout in (0.5, 2, 5):  # on a loaded machine grpc's own end may come first
        served.core.reset()
        with pytest.raises(grpc.RpcError) as caught:
            generate(client, text="hold-first", timeout=timeout)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        (request,) = served.core.requests
        assert request.deadline_s < timeout
        if caught.value.details() == f"the fake's {request.deadline_s:g} s passed":
            assert details(caught.value)["ErrorInfo"].reason == "DEADLINE_EXCEEDED"
            return
    raise AssertionError(f"only grpc's own words: {caught.value.details()}")


def test_the_last_word_never_takes_much_of_a_short_deadline():
    assert before(60) == pytest.approx(60 - LAST_WORD_S)
    assert before(0.2) == pytest.approx(0.18)
    assert before(0) == 0 and before(-1) == -1  # refused as having passed


def test_health_follows_the_dispatcher(served, client):
    kinds = health_pb2.HealthCheckResponse
    stub = health_pb2_grpc.HealthStub(client.channel)

    def wait_for(service: str, status: int) -> None:
        stream = stub.Watch(health_pb2.HealthCheckRequest(service=service), timeout=10)
        assert any(answer.status == status for answer in stream)
        stream.cancel()

    for service in ("", INFERENCE):
        wait_for(service, kinds.SERVING)
    served.core.ready = (False, "no decode worker")
    for service in ("", INFERENCE):
        wait_for(service, kinds.NOT_SERVING)
    served.core.ready = (True, "")
    wait_for("", kinds.SERVING)


def test_admin_calls_need_the_clusters_token(served, client):
    with pytest.raises(grpc.RpcError) as caught:
        client.call(ADMIN, "Status", {})
    assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
