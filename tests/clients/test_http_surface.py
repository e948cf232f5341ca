"""The HTTP front as bytes: every bad input, headers, limits, events, and the small endpoints."""

from __future__ import annotations

import json
import socket

import httpx
import pytest
from clients.fake_core import ANSWER

HI = [{"role": "user", "content": "hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"

BAD = [
    # path, body, status, param, words of the message
    (CHAT, {"model": "gpt-9", "messages": HI}, 404, "model", ["gpt-9"]),
    (TEXT, {"model": "gpt-9", "prompt": "hi"}, 404, "model", ["gpt-9"]),
    (TEXT, {"prompt": ""}, 400, "prompt", ["empty"]),
    (TEXT, {"prompt": []}, 400, "prompt", ["empty"]),
    (TEXT, {"prompt": [[]]}, 400, "prompt", ["empty"]),
    (TEXT, {}, 400, "prompt", ["missing"]),
    (CHAT, {"messages": []}, 400, "messages", ["empty"]),
    (CHAT, {}, 400, "messages", ["missing"]),
    (
        CHAT,
        {"messages": [{"role": "user", "content": ""}]},
        400,
        "messages[0].content",
        ["empty"],
    ),
    (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, 400, "messages[0].role", ["robot"]),
    (TEXT, {"prompt": "hi", "max_tokens": -1}, 400, "max_tokens", ["-1"]),
    (TEXT, {"prompt": "hi", "max_tokens": 0}, 400, "max_tokens", ["0"]),
    (CHAT, {"messages": HI, "max_completion_tokens": -5}, 400, "max_completion_tokens", ["-5"]),
    (TEXT, {"prompt": "hi", "temperature": -1}, 400, "temperature", ["-1"]),
    (TEXT, {"prompt": "hi", "temperature": 9}, 400, "temperature", ["9"]),
    (TEXT, '{"prompt": "hi", "temperature": NaN}', 400, "temperature", ["NaN"]),
    (TEXT, '{"prompt": "hi", "temperature": Infinity}', 400, "temperature", ["Infinity"]),
    (TEXT, '{"prompt": "hi", "temperature": 1e999}', 400, "temperature", ["inf"]),
    (TEXT, '{"prompt": "hi", "\\ud800": NaN}', 400, None, ["NaN"]),
    (TEXT, {"prompt": "hi", "max_tokens": 10**4300 - 1}, 400, "max_tokens", ["32"]),
    (TEXT, {"prompt": "hi", "temperature": "hot"}, 400, "temperature", ["number"]),
    (TEXT, {"prompt": "hi", "temperature": True}, 400, "temperature", ["boolean"]),
    (TEXT, {"prompt": "hi", "top_p": 0}, 400, "top_p", ["0"]),
    (TEXT, {"prompt": "hi", "top_p": 1.5}, 400, "top_p", ["1.5"]),
    (TEXT, {"prompt": "hi", "top_k": -2}, 400, "top_k", ["-2"]),
    (TEXT, {"prompt": "hi", "max_tokens": True}, 400, "max_tokens", ["boolean"]),
    (TEXT, {"prompt": "hi", "max_tokens": 1.5}, 400, "max_tokens", ["integer"]),
    (TEXT, {"prompt": "hi", "seed": 1 << 64}, 400, "seed", ["64"]),
    (TEXT, {"prompt": "hi", "stop": [""]}, 400, "stop", ["empty"]),
    (TEXT, {"prompt": "hi", "stop": ["x"] * 17}, 400, "stop", ["17", "16"]),
    (TEXT, {"prompt": "hi", "stop": 3}, 400, "stop", ["string"]),
    (TEXT, {"prompt": [-1]}, 400, "prompt", ["-1"]),
    (CHAT, {"messages": HI, "tools": [{}]}, 400, "tools", ["tools"]),
    (TEXT, {"prompt": "hi", "stream_options": "x"}, 400, "stream_options", ["object"]),
    (TEXT, {"prompt": "hi", "request_id": "a b"}, 400, "request_id", ["spaces"]),
    (TEXT, '{"prompt": "\\ud800"}', 400, "prompt", ["surrogate"]),
    (TEXT, '{"prompt": "hi"', 400, None, ["JSON"]),
    (TEXT, "", 400, None, ["JSON"]),
    (TEXT, "[1]", 400, None, ["object"]),
    (TEXT, "null", 400, None, ["object"]),
    (TEXT, "[" * 50_000, 400, None, ["nested"]),
    (TEXT, b"\xff\xfe\xfd", 400, None, ["UTF"]),
]
# The same, with the fake model's own numbers.
BAD_HERE = [
    (TEXT, {"prompt": [1 << 40]}, 400, "prompt", ["1099511627776", "255"]),
    (TEXT, {"prompt": "x" * 600}, 400, "prompt", ["600", "512"]),
    (TEXT, {"prompt": "x" * 512}, 400, "prompt", ["512"]),
    (TEXT, {"prompt": "x" * 500, "max_tokens": 50}, 400, "max_tokens", ["500", "50", "512"]),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 9000}]}, 400, "messages", ["512"]),
]
CASES = ("path", "body", "status", "param", "words")


def post_bad(
    http: httpx.Client, path: str, body: dict | str | bytes, stream: bool
) -> httpx.Response:
    if isinstance(body, dict):
        body = json.dumps(body | {"stream": stream})
    return http.post(path, content=body, headers={"content-type": "application/json"})


def check_refusal(answer: httpx.Response, status: int, param: str | None, words: list[str]) -> None:
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-should-retry"] == "false"
    assert answer.headers["x-request-id"]
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    for word in words:
        assert word in error["message"]


@pytest.mark.parametrize(CASES, BAD)
def test_bad_input_is_named_and_harms_nobody(http, path, body, status, param, words):
    for stream in (False, True):
        check_refusal(post_bad(http, path, body, stream), status, param, words)
    good = http.post(TEXT, json={"prompt": "hi", "max_tokens": 2})
    assert good.status_code == 200


@pytest.mark.parametrize(CASES, BAD + BAD_HERE)
def test_bad_input_never_reaches_the_dispatcher(served, http, path, body, status, param, words):
    check_refusal(post_bad(http, path, body, False), status, param, words)
    assert served.core.requests == []


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(http):
    context = http.get("/v1/models").json()["data"][0]["max_model_len"]
    for n_prompt in (context, context + 7):
        answer = http.post(TEXT, json={"prompt": [65] * n_prompt})
        check_refusal(answer, 400, "prompt", [str(n_prompt), str(context)])
    asked = {"prompt": [65] * (context - 2), "max_tokens": 3}
    check_refusal(http.post(TEXT, json=asked), 400, "max_tokens", [str(context + 1), str(context)])


def test_codes_are_stable_words(http: httpx.Client):
    def code(body: dict) -> str:
        return http.post(TEXT, json=body).json()["error"]["code"]

    assert code({"model": "x", "prompt": "hi"}) == "model_not_found"
    assert code({"prompt": "hi", "max_tokens": 10**6}) == "context_length_exceeded"
    assert code({"prompt": ""}) == "invalid_argument"


def test_unknown_paths_and_methods_have_the_same_shape(http: httpx.Client):
    for method, path, status in (
        ("GET", "/v1/unknown", 404),
        ("POST", "/v1", 404),
        ("GET", TEXT, 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/models/another", 404),
    ):
        answer = http.request(method, path)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert answer.headers["x-request-id"]
    assert "POST" in http.get(TEXT).headers["allow"]


def test_another_content_type_is_refused_with_words(http: httpx.Client):
    answer = http.post(TEXT, content=b'{"prompt": "hi"}', headers={"content-type": "text/plain"})
    assert answer.status_code == 400
    assert "application/json" in answer.json()["error"]["message"]
    typed = {"content-type": "Application/JSON; charset=utf-8"}
    answer = http.post(TEXT, content=b'{"prompt": "hi", "max_tokens": 1}', headers=typed)
    assert answer.status_code == 200


def test_a_body_beyond_the_limit_is_refused_and_the_client_hears_why(served, http):
    for size in (100_001, 300_000, 3_000_000):  # the last one is not even read to its end
        answer = http.post(TEXT, json={"prompt": "x" * size})
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "request_too_large"
    assert served.core.requests == []


def test_ids_are_echoed_or_drawn(served, http):
    asked = {"prompt": "hi", "max_tokens": 1}
    echoed = http.post(TEXT, json=asked, headers={"x-request-id": "abc-1"})
    assert echoed.headers["x-request-id"] == "abc-1"
    assert served.core.requests[-1].request_id != "abc-1"
    drawn = http.post(TEXT, json=asked)
    assert drawn.headers["x-request-id"] == served.core.requests[-1].request_id
    assert drawn.json()["id"] == "cmpl-" + drawn.headers["x-request-id"]
    named = http.post(TEXT, json=asked | {"request_id": "mine"})
    assert named.headers["x-request-id"] == "mine"
    assert named.json()["id"] == "cmpl-mine"
    many = http.post(TEXT, json=asked | {"request_id": "many", "prompt": ["a", "b"]})
    assert many.json()["id"] == "cmpl-many"
    assert {r.request_id for r in served.core.requests[-2:]} == {"many-0", "many-1"}
    unusable = http.post(TEXT, json=asked, headers={"x-request-id": "two words"})
    assert unusable.headers["x-request-id"] == served.core.requests[-1].request_id


def test_what_the_dispatcher_refuses_names_its_field(http, served):
    answer = http.post(TEXT, json={"prompt": "refuse-id", "request_id": "twice"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "request_id"
    assert answer.headers["x-should-retry"] == "false"


def test_the_events_of_a_stream_byte_by_byte(served, http):
    body = {"model": "tiny", "messages": HI, "max_tokens": 2, "stream": True, "request_id": "r"}
    body["stream_options"] = {"include_usage": True}
    answer = http.post(CHAT, json=body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    lines = answer.text.split("\n\n")
    assert lines.pop() == ""
    assert lines.pop() == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    for event in events:
        assert event["object"] == "chat.completion.chunk"
        assert event["id"] == "chatcmpl-r"
        assert event["model"] == "tiny"
    assert [event["choices"] for event in events] == [
        [_choice({"role": "assistant", "content": ""})],
        [_choice({"content": ANSWER[0]})],
        [_choice({"content": ANSWER[1]})],
        [_choice({}) | {"finish_reason": "length", "stop_reason": None}],
        [],
    ]
    assert [event["usage"] for event in events[:-1]] == [None] * 4
    assert events[-1]["usage"]["completion_tokens"] == 2
    assert events[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 10}


def _choice(delta: dict) -> dict:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}


def test_comments_keep_a_waiting_stream_alive(served, http):
    body = {"prompt": "hold-first", "stream": True, "max_tokens": 1}
    with http.stream("POST", TEXT, json=body) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        assert next(lines) == ": keep-alive"
        served.core.release()
        rest = [line for line in lines if line.startswith("data: ")]
    assert json.loads(rest[0].removeprefix("data: "))["choices"][0]["text"] == ANSWER[0]
    assert rest[-1] == "data: [DONE]"


def test_a_broken_stream_ends_with_an_error_event_and_no_done(served, http):
    answer = http.post(TEXT, json={"prompt": "fail-later", "stream": True})
    assert answer.status_code == 200
    last = answer.text.strip().split("\n\n")[-1]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["code"] == "unavailable"
    assert "decode-0 died" in error["message"]


def test_the_root_says_where_to_look(http):
    answer = http.get("/")
    assert answer.status_code == 200
    root = answer.json()
    assert root.pop("service") == "tandem"
    assert root == {"models": "/v1/models", "health": "/health", "metrics": "/metrics"}
    assert [http.get(path).status_code for path in root.values()] == [200, 200, 200]


def test_hanging_up_in_the_middle_of_the_request_is_harmless(served, http):
    host, port = served.endpoints.http.split(":")
    with socket.create_connection((host, int(port))) as half:
        half.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b'content-length: 5000\r\n\r\n{"prompt": "'
        )
    with socket.create_connection((host, int(port))) as noise:
        noise.sendall(b"\x16\x03\x01 this is not HTTP\r\n\r\n")
        assert b"400" in noise.recv(1000)
    assert http.get("/health").status_code == 200


def test_a_body_that_never_comes_whole_ends_by_the_clock(served, http):
    host, port = served.endpoints.http.split(":")
    with socket.create_connection((host, int(port)), timeout=20) as half:
        half.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b'content-length: 5000\r\n\r\n{"prompt": "'
        )
        answer = b"".join(iter(lambda: half.recv(1000), b""))  # until the server closes
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"not complete after 1 s" in answer
    assert http.get("/health").status_code == 200


def test_readiness_follows_the_dispatcher_and_health_does_not(served, http):
    assert http.get("/ready").json() == {"status": "ready", "detail": ""}
    served.core.ready = (True, "no prefill worker: prompts run on decode workers")
    assert http.get("/ready").json()["status"] == "degraded"
    served.core.ready = (False, "no decode worker")
    answer = http.get("/ready")
    assert answer.status_code == 503
    assert "no decode worker" in answer.json()["error"]["message"]
    assert answer.headers["retry-after"] == "1"
    assert http.get("/health").json() == {"status": "ok"}


def test_version_metrics_and_load(http: httpx.Client):
    assert http.get("/version").json()["version"]
    metrics = http.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    assert "tandem_" in metrics.text
    load = http.get("/load").json()
    assert {"running", "queued", "workers"} <= set(load)
