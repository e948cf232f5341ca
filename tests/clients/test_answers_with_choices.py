"""n, logprobs, echo, prompt logprobs, cached tokens: as OpenAI's SDK and gRPC clients see them."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest
from clients.fake_core import ANSWER, OTHER_ANSWER, logprobs_of
from clients.grpc_by_reflection import ReflectedClient

INFERENCE = "tandem.v1.Inference"
CHAT = [{"role": "user", "content": "Say something."}]
PROMPT = "grüße"
N_PROMPT = len(PROMPT.encode())


@pytest.fixture
def client(grpc_address: str) -> Iterator[ReflectedClient]:
    client = ReflectedClient(grpc_address)
    yield client
    client.close()


def in_pieces(stream, *, chat: bool) -> dict[int, dict]:
    """Text, logprobs and ending of every choice of a stream, put together."""
    whole: dict[int, dict] = {}
    for chunk in stream:
        for choice in chunk.choices:
            so_far = whole.setdefault(choice.index, {"text": "", "logprobs": {}, "finish": None})
            assert so_far["finish"] is None, "nothing of a choice may follow its end"
            so_far["text"] += (choice.delta.content or "") if chat else choice.text
            so_far["finish"] = choice.finish_reason
            if choice.logprobs is not None:
                for name, values in choice.logprobs.model_dump().items():
                    if values is not None:
                        so_far["logprobs"].setdefault(name, []).extend(values)
    return whole


def as_pieces(choices, *, chat: bool) -> dict[int, dict]:
    """The choices of a reply in one piece, in the form of ``in_pieces``."""
    return {
        choice.index: {
            "text": choice.message.content if chat else choice.text,
            "logprobs": {
                name: values
                for name, values in (
                    choice.logprobs.model_dump() if choice.logprobs else {}
                ).items()
                if values is not None
            },
            "finish": choice.finish_reason,
        }
        for choice in choices
    }


def written(word: str, prefix: str = "bytes:") -> bytes:
    """The bytes that a token's text in JSON stands for."""
    if not word.startswith(prefix + "\\x"):
        return word.encode()
    return bytes.fromhex(word.removeprefix(prefix).replace("\\x", ""))


def test_the_logprobs_of_a_completion(served, sdk, model):
    answer = sdk.completions.create(model=model, prompt="Hi", logprobs=2)
    (choice,) = answer.choices
    told = choice.logprobs
    tokens = list(ANSWER.encode())
    assert b"".join(written(word) for word in told.tokens) == ANSWER.encode()
    expected = [logprobs_of(served.core.codec.encode(chr(b))[0], 2) for b in tokens if b < 128]
    plain = [i for i, b in enumerate(tokens) if b < 128]
    assert [told.token_logprobs[i] for i in plain] == [entry.logprob for entry in expected]
    for i, top in enumerate(told.top_logprobs):
        assert top[told.tokens[i]] == told.token_logprobs[i], "the token itself is among them"
        assert len(top) == 3
    # Every token begins where its text does; those inside a character at that character.
    at = 0
    for word, offset in zip(told.tokens, told.text_offset, strict=True):
        if not word.startswith("bytes:"):
            assert ANSWER[offset : offset + 1] == word
        assert offset in (at, at + 1)
        at = offset
    assert told.text_offset[-1] == len(ANSWER) - 1


def test_no_likeliest_tokens_are_the_token_alone(served, sdk, model):
    told = sdk.completions.create(model=model, prompt="Hi", logprobs=0).choices[0].logprobs
    assert told.top_logprobs == [
        {word: value} for word, value in zip(told.tokens, told.token_logprobs, strict=True)
    ]
    assert sdk.completions.create(model=model, prompt="Hi").choices[0].logprobs is None


def test_the_logprobs_of_a_chat(served, sdk, model):
    answer = sdk.chat.completions.create(model=model, messages=CHAT, logprobs=True, top_logprobs=3)
    told = answer.choices[0].logprobs
    assert told.refusal is None
    assert b"".join(bytes(entry.bytes) for entry in told.content) == ANSWER.encode()
    for entry in told.content:
        assert len(entry.top_logprobs) == 3
        assert written(entry.token, "") == bytes(entry.bytes)
        assert entry.top_logprobs[0].logprob == -0.5
    plain = sdk.chat.completions.create(model=model, messages=CHAT, logprobs=True)
    assert all(entry.top_logprobs == [] for entry in plain.choices[0].logprobs.content)
    assert sdk.chat.completions.create(model=model, messages=CHAT).choices[0].logprobs is None


@pytest.mark.parametrize("stop", [None, "Two."])
@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_is_the_same_answer_in_pieces(served, sdk, model, n, stop):
    asked = {"model": model, "n": n, "stop": stop, "logprobs": 1, "max_tokens": 60}
    whole = sdk.completions.create(prompt=["Hi", "Ho"], **asked)
    stream = sdk.completions.create(prompt=["Hi", "Ho"], stream=True, **asked)
    pieces = as_pieces(whole.choices, chat=False)
    assert in_pieces(stream, chat=False) == pieces
    assert [choice.index for choice in whole.choices] == list(range(2 * n))
    answers = [ANSWER, OTHER_ANSWER, ANSWER][:n] * 2
    for i, answer in enumerate(answers):
        assert pieces[i]["text"] == (answer if stop is None else answer[: answer.index(stop)])
        assert pieces[i]["finish"] == "stop"
    n_tokens = sum(len(piece["logprobs"]["tokens"]) for piece in pieces.values())
    assert whole.usage.completion_tokens == n_tokens
    assert whole.usage.prompt_tokens == 4, "each prompt counts once"


@pytest.mark.parametrize("n", [1, 2])
def test_a_streamed_chat_is_the_same_answer_in_pieces(served, sdk, model, n):
    asked = {"model": model, "messages": CHAT, "n": n, "logprobs": True, "top_logprobs": 1}
    whole = sdk.chat.completions.create(**asked)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(sdk.chat.completions.create(stream=True, stream_options=options, **asked))
    assert in_pieces(chunks, chat=True) == as_pieces(whole.choices, chat=True)
    assert [chunk.choices[0].delta.role for chunk in chunks[:n]] == ["assistant"] * n
    assert [chunk.choices[0].index for chunk in chunks[:n]] == list(range(n))
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert whole.usage.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens // 2 > 0


def test_choices_end_each_by_itself(served, sdk, model):
    asked = {"model": model, "prompt": "Hi", "n": 2, "max_tokens": len(OTHER_ANSWER.encode())}
    whole = sdk.completions.create(**asked)
    assert [c.finish_reason for c in whole.choices] == ["length", "stop"]
    whole = sdk.completions.create(stop=["gr", "Two. And"], **asked)
    assert [c.stop_reason for c in whole.choices] == ["gr", "Two. And"]
    assert [c.text for c in whole.choices] == [
        ANSWER[: ANSWER.index("gr")],
        OTHER_ANSWER[: OTHER_ANSWER.index("Two.")],
    ]


def test_a_failure_after_one_choice_has_ended_fails_the_call(served, sdk, model):
    with pytest.raises(openai.InternalServerError, match="decode-0 died"):
        sdk.completions.create(model=model, prompt="fail-later", n=2, stop="Ta")


def test_hanging_up_on_a_stream_of_choices_cancels_the_answer(served, sdk, model):
    stream = sdk.completions.create(model=model, prompt="hold-later", n=2, stream=True)
    assert next(iter(stream)).choices[0].text
    stream.close()
    assert served.core.wait_for(lambda: len(served.core.cancelled) == 1)


@pytest.mark.parametrize("prompt", [PROMPT, "token ids"])
@pytest.mark.parametrize("n", [1, 2])
def test_an_echo_puts_the_prompt_before_every_choice(served, sdk, model, prompt, n):
    if prompt == "token ids":
        prompt = list(served.core.codec.encode(PROMPT))
    asked = {"model": model, "prompt": prompt, "echo": True, "n": n}
    whole = sdk.completions.create(**asked)
    assert [c.text for c in whole.choices] == [PROMPT + ANSWER, PROMPT + OTHER_ANSWER][:n]
    assert whole.choices[0].logprobs is None
    with_logprobs = sdk.completions.create(logprobs=1, **asked)
    for choice in with_logprobs.choices:
        told = choice.logprobs
        assert b"".join(written(word) for word in told.tokens) == choice.text.encode()
        assert told.token_logprobs[0] is None and told.top_logprobs[0] is None
        assert all(value is not None for value in told.token_logprobs[1:])
        assert told.text_offset == sorted(told.text_offset)
        assert told.text_offset[N_PROMPT] == len(PROMPT)
    stream = sdk.completions.create(logprobs=1, stream=True, **asked)
    assert in_pieces(stream, chat=False) == as_pieces(with_logprobs.choices, chat=False)


@pytest.mark.parametrize("n", [1, 2])
def test_an_echo_of_no_tokens_scores_the_prompt(served, sdk, model, n):
    asked = {"model": model, "prompt": PROMPT, "echo": True, "max_tokens": 0, "n": n}
    whole = sdk.completions.create(logprobs=0, **asked)
    for choice in whole.choices:
        assert choice.text == PROMPT
        assert len(choice.logprobs.tokens) == N_PROMPT
        assert choice.finish_reason == "length"
    assert whole.usage.completion_tokens == 0
    stream = sdk.completions.create(logprobs=0, stream=True, **asked)
    assert in_pieces(stream, chat=False) == as_pieces(whole.choices, chat=False)
    assert sdk.completions.create(**asked).choices[0].text == PROMPT
    assert all(request.sampling.max_tokens == 1 for request in served.core.requests)


def test_prompt_logprobs_are_those_of_vllm(served, http):
    body = {"prompt": PROMPT, "prompt_logprobs": 1, "max_tokens": 1}
    (choice,) = http.post("/v1/completions", json=body).json()["choices"]
    first, *rest = choice["prompt_logprobs"]
    assert first is None and len(rest) == N_PROMPT - 1
    tokens = served.core.codec.encode(PROMPT)[1:]
    for token, told in zip(tokens, rest, strict=True):
        assert set(told) == {str(token), str((token + 1) % 256)}
        entry = logprobs_of(token, 1)
        assert told[str(token)]["logprob"] == entry.logprob
        assert told[str(token)]["rank"] == 3
        assert told[str((token + 1) % 256)]["rank"] == 1
        assert isinstance(told[str(token)]["decoded_token"], str)
    body = {"messages": CHAT, "prompt_logprobs": 0, "n": 2}
    reply = http.post("/v1/chat/completions", json=body).json()
    assert len(reply["prompt_logprobs"]) == reply["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in reply["choices"][0]
    # For echo's sake they are made as well, but not told where nobody asked.
    body = {"prompt": PROMPT, "echo": True, "logprobs": 2, "prompt_logprobs": 0, "max_tokens": 1}
    (choice,) = http.post("/v1/completions", json=body).json()["choices"]
    assert all(len(told) == 1 for told in choice["prompt_logprobs"][1:])
    assert all(len(top) == 3 for top in choice["logprobs"]["top_logprobs"][1:])
    del body["prompt_logprobs"]
    assert "prompt_logprobs" not in http.post("/v1/completions", json=body).json()["choices"][0]


def test_a_schema_in_the_sdks_words_reaches_the_dispatcher(served, sdk, model):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    sdk.chat.completions.create(
        model=model,
        messages=CHAT,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "it", "strict": True, "schema": schema},
        },
    )
    (request,) = served.core.requests
    assert json.loads(request.sampling.grammar.text) == schema


def test_a_grpc_client_gets_typed_choices_logprobs_and_the_prompt(served, client):
    events = list(
        client.call(
            INFERENCE,
            "Generate",
            {"text": PROMPT, "n": 2, "echo": True, "logprobs": 1, "stop": ["Two."]},
            timeout=60,
        )
    )
    *chunks, end = (getattr(event, event.WhichOneof("event")) for event in events)
    texts, counts, reasons = ["", ""], [0, 0], [[], []]
    for chunk in chunks:
        texts[chunk.choice] += chunk.text
        assert chunk.index == counts[chunk.choice]
        if chunk.index == 0:
            assert chunk.prompt_text == PROMPT
            assert len(chunk.prompt_token_ids) == N_PROMPT == len(chunk.prompt_logprobs) + 1
        else:
            assert not chunk.prompt_text and not chunk.prompt_logprobs
        counts[chunk.choice] += len(chunk.token_ids)
        reasons[chunk.choice].append((chunk.finish_reason, chunk.matched_stop))
        for token, told in zip(chunk.token_ids, chunk.logprobs, strict=True):
            entry = logprobs_of(token, 1)
            assert (told.token_id, told.logprob, told.rank) == (token, entry.logprob, 3)
            assert told.token == served.core.codec.token_bytes(token)
            assert [(top.token_id, top.logprob) for top in told.top] == list(entry.top)
    assert texts == [answer[: answer.index("Two.")] for answer in (ANSWER, OTHER_ANSWER)]
    for told in reasons:
        assert told[-1] == (1, "Two.") and set(told[:-1]) == {(0, "")}
    assert end.usage.completion_tokens == sum(counts)
    assert end.usage.prompt_tokens == N_PROMPT
    assert end.usage.cached_tokens == N_PROMPT // 2


def test_a_grpc_echo_may_ask_for_no_tokens(served, client):
    asked = {"text": PROMPT, "echo": True, "max_tokens": 0, "prompt_logprobs": 2}
    chunk, end = client.call(INFERENCE, "Generate", asked, timeout=60)
    assert chunk.chunk.prompt_text == PROMPT and not chunk.chunk.token_ids
    assert len(chunk.chunk.prompt_logprobs) == N_PROMPT - 1
    assert end.complete.usage.completion_tokens == 0 and end.complete.finish_reason == 2
