"""OpenAI's own SDK against the HTTP front: streams, whole answers, errors, hang-up."""

from __future__ import annotations

import openai
import pytest
from clients.fake_core import ANSWER

CHAT = [{"role": "user", "content": "Say something in one short sentence."}]
ASKED = {"max_tokens": 24, "temperature": 0, "seed": 1}


def test_the_model_is_listed(sdk: openai.OpenAI, model: str):
    assert [entry.id for entry in sdk.models.list()] == [model]
    assert sdk.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError):
        sdk.models.retrieve("another")


def test_a_streamed_chat_has_role_text_end_and_usage(sdk: openai.OpenAI, model: str):
    stream = sdk.chat.completions.create(
        model=model,
        messages=CHAT,
        stream=True,
        stream_options={"include_usage": True},
        **ASKED,
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.id == chunks[0].id for chunk in chunks)
    assert chunks[0].id.startswith("chatcmpl-")
    *body, last, usage = chunks
    assert all(chunk.usage is None for chunk in (*body, last))
    assert all(chunk.choices[0].finish_reason is None for chunk in body)
    assert last.choices[0].finish_reason in ("stop", "length")
    assert usage.choices == []
    assert usage.usage.total_tokens == usage.usage.prompt_tokens + usage.usage.completion_tokens
    assert 0 < usage.usage.completion_tokens <= 24


def test_streamed_and_whole_chats_are_the_same_text(sdk: openai.OpenAI, model: str):
    whole = sdk.chat.completions.create(model=model, messages=CHAT, **ASKED)
    stream = sdk.chat.completions.create(model=model, messages=CHAT, stream=True, **ASKED)
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert whole.choices[0].message.role == "assistant"
    assert whole.usage.completion_tokens <= 24
    assert chunks[-1].usage is None


def test_streamed_and_whole_completions_are_the_same_text(sdk: openai.OpenAI, model: str):
    whole = sdk.completions.create(model=model, prompt="Once upon", **ASKED)
    stream = sdk.completions.create(model=model, prompt="Once upon", stream=True, **ASKED)
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert whole.id.startswith("cmpl-")


def test_several_prompts_are_several_choices(sdk: openai.OpenAI, model: str):
    prompts = ["One", "Two and more", "Three"]
    whole = sdk.completions.create(model=model, prompt=prompts, **ASKED)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    alone = [sdk.completions.create(model=model, prompt=prompt, **ASKED) for prompt in prompts]
    assert [c.text for c in whole.choices] == [one.choices[0].text for one in alone]
    assert whole.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone)
    stream = sdk.completions.create(model=model, prompt=prompts, stream=True, **ASKED)
    texts = {0: "", 1: "", 2: ""}
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert [texts[i] for i in range(3)] == [c.text for c in whole.choices]


def test_token_ids_are_a_prompt(sdk: openai.OpenAI, model: str):
    one = sdk.completions.create(model=model, prompt=[5, 6, 7], **ASKED)
    assert one.usage.prompt_tokens == 3
    many = sdk.completions.create(model=model, prompt=[[5, 6, 7], [8]], **ASKED)
    assert many.usage.prompt_tokens == 4
    assert many.choices[0].text == one.choices[0].text


def test_usage_on_every_chunk_where_asked(sdk: openai.OpenAI, model: str):
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = sdk.completions.create(
        model=model, prompt="Hi", stream=True, stream_options=options, **ASKED
    )
    counts = [chunk.usage.completion_tokens for chunk in stream]
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2] > 0


def test_the_whole_answer_arrives_with_characters_split_over_tokens(served, sdk, model):
    stream = sdk.chat.completions.create(model=model, messages=CHAT, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == ANSWER


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_text(served, sdk, model, stream, include):
    answer = sdk.completions.create(
        model=model,
        prompt="Hi",
        stop=["nothing", "Two."],
        stream=stream,
        extra_body={"include_stop_str_in_output": include},
    )
    choices = [c.choices[0] for c in answer] if stream else [answer.choices[0]]
    before = ANSWER[: ANSWER.index("Two.")]
    assert "".join(choice.text for choice in choices) == before + ("Two." if include else "")
    assert choices[-1].finish_reason == "stop"
    assert choices[-1].stop_reason == "Two."


def test_sampling_fields_reach_the_dispatcher(served, sdk, model):
    sdk.chat.completions.create(
        model=model,
        messages=CHAT,
        max_completion_tokens=3,
        temperature=0.5,
        top_p=0.25,
        seed=9,
        extra_body={"top_k": 4, "ignore_eos": True, "priority": 2, "request_id": "my-id"},
    )
    (request,) = served.core.requests
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (3, 0.5, 0.25)
    assert (sampling.seed, sampling.top_k, sampling.ignore_eos) == (9, 4, True)
    assert (request.priority, request.request_id) == (2, "my-id")


def test_a_seed_is_drawn_for_every_request(served, sdk, model):
    for _ in range(2):
        sdk.completions.create(model=model, prompt="Hi", max_tokens=1)
    seeds = {request.sampling.seed for request in served.core.requests}
    assert len(seeds) == 2


def test_an_early_failure_is_a_status_also_for_a_stream(served, sdk, model):
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError) as caught:
            sdk.completions.create(model=model, prompt="fail-first", stream=stream)
        assert caught.value.status_code == 503
        assert caught.value.response.headers["retry-after"] == "3"
        assert "decode-0 died" in caught.value.message
        assert caught.value.type == "overloaded_error"


def test_the_sdk_repeats_what_may_be_repeated_and_nothing_else(served, base_url, model):
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key="x", max_retries=1) as sdk:
        with pytest.raises(openai.InternalServerError):
            sdk.completions.create(model=model, prompt="full-first")
        assert len(served.core.requests) == 2
        with pytest.raises(openai.InternalServerError):
            sdk.completions.create(model=model, prompt="bug-first")
        assert len(served.core.requests) == 3


def test_a_failure_in_the_middle_of_a_stream_is_raised_by_the_sdk(served, sdk, model):
    got = []
    with pytest.raises(openai.APIError, match="decode-0 died"):
        for chunk in sdk.completions.create(model=model, prompt="fail-later", stream=True):
            got.append(chunk.choices[0].text)
    assert "".join(got) == ANSWER[:2]


def test_a_failure_in_the_middle_of_a_whole_answer_is_a_status(served, sdk, model):
    with pytest.raises(openai.InternalServerError, match="decode-0 died"):
        sdk.completions.create(model=model, prompt="fail-later")


def test_one_failed_prompt_of_several_fails_the_call_and_cancels_the_rest(served, sdk, model):
    with pytest.raises(openai.InternalServerError):
        sdk.completions.create(model=model, prompt=["hold-first", "fail-first", "hold-later"])
    assert served.core.wait_for(lambda: len(served.core.cancelled) == 2)


def test_a_bug_is_an_incident_without_its_words(served, sdk, model):
    for place in ("first", "later"):
        with pytest.raises(openai.APIError) as caught:
            list(sdk.completions.create(model=model, prompt=f"bug-{place}", stream=True))
        assert "incident" in caught.value.message
        assert "secret" not in str(caught.value.body)


def test_hanging_up_on_a_stream_cancels_the_answer(served, sdk, model):
    stream = sdk.completions.create(model=model, prompt="hold-later", stream=True)
    assert next(iter(stream)).choices[0].text
    stream.close()
    assert served.core.wait_for(lambda: len(served.core.cancelled) == 1)


@pytest.mark.parametrize("stream", [False, True])
def test_hanging_up_before_the_first_token_cancels_the_answer(served, sdk, model, stream):
    # For the stream: before the first keep-alive, so that nothing at all was sent.
    impatient = sdk.with_options(timeout=0.1)
    with pytest.raises(openai.APITimeoutError):
        impatient.completions.create(model=model, prompt="hold-first", stream=stream)
    assert served.core.wait_for(lambda: len(served.core.cancelled) == 1)
