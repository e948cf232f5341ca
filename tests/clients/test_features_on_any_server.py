"""Choices, logprobs, echo and forms against every server: the fake, real workers, a named one."""

from __future__ import annotations

import json

import openai
import pytest
from clients.conftest import Server

CHAT = [{"role": "user", "content": "Say something in one short sentence."}]
ASKED = {"max_tokens": 6, "temperature": 0, "seed": 1, "extra_body": {"ignore_eos": True}}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


def test_choices_are_numbered_and_counted(sdk: openai.OpenAI, model: str):
    whole = sdk.completions.create(model=model, prompt=["One", "Two"], n=2, **ASKED)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert all(choice.finish_reason == "length" for choice in whole.choices)
    assert whole.usage.completion_tokens == 24
    alone = sdk.completions.create(model=model, prompt="One", **ASKED)
    assert whole.choices[0].text == alone.choices[0].text


def test_every_token_has_its_logprob(sdk: openai.OpenAI, model: str):
    told = sdk.completions.create(model=model, prompt="Hi", logprobs=2, **ASKED)
    logprobs = told.choices[0].logprobs
    lengths = {len(logprobs.tokens), len(logprobs.token_logprobs), len(logprobs.text_offset)}
    assert lengths == {len(logprobs.top_logprobs)} == {6}
    chat = sdk.chat.completions.create(
        model=model, messages=CHAT, logprobs=True, top_logprobs=2, n=2, **ASKED
    )
    for choice in chat.choices:
        assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [2] * 6
        assert all(entry.logprob <= 0 for entry in choice.logprobs.content)


def test_streamed_choices_are_those_of_the_whole_answer(sdk: openai.OpenAI, model: str):
    asked = ASKED | {"temperature": 1}
    whole = sdk.chat.completions.create(model=model, messages=CHAT, n=3, **asked)
    texts, ends = ["", "", ""], [None] * 3
    for chunk in sdk.chat.completions.create(model=model, messages=CHAT, n=3, stream=True, **asked):
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        ends[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]


def test_a_prompt_is_scored_by_its_echo(sdk: openai.OpenAI, model: str):
    prompt = "The sky is blue."
    asked = {"model": model, "prompt": prompt, "echo": True, "logprobs": 1}
    (choice,) = sdk.completions.create(max_tokens=0, **asked).choices
    assert choice.text == prompt
    first, *rest = choice.logprobs.token_logprobs
    assert first is None and rest and all(value < 0 for value in rest)
    (choice,) = sdk.completions.create(max_tokens=2, **asked).choices
    assert choice.text.startswith(prompt)
    assert len(choice.logprobs.tokens) == len(rest) + 3


@pytest.mark.parametrize("n", [1, 2])
def test_an_answer_follows_its_schema(server: Server, sdk: openai.OpenAI, model: str, n: int):
    if server.served is not None:
        pytest.skip("the fake follows no grammar")
    answer = sdk.chat.completions.create(
        model=model,
        messages=CHAT,
        n=n,
        max_tokens=60,
        seed=5,
        response_format={"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}},
    )
    for choice in answer.choices:
        assert isinstance(json.loads(choice.message.content)["ok"], bool)
        assert choice.finish_reason == "stop"


def test_a_repeated_prompt_is_found_in_the_cache(server: Server, sdk: openai.OpenAI, model: str):
    prompt = [50 + i % 20 for i in range(100)]
    asked = {"model": model, "prompt": prompt, **ASKED}
    sdk.completions.create(**asked)
    usage = sdk.completions.create(**asked).usage
    assert 0 < usage.prompt_tokens_details.cached_tokens < 100
