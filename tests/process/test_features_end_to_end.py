"""The golden matrix: every sampling feature gives the same JSON colocated and disaggregated.

A tiny random model behind real workers and a real router, asked over HTTP. Both modes get the same
requests; ids, times and timings aside, every reply must be equal, and each must show that its
feature did something.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serving import serving, small_config
from tiny import EOS, tiny_llama

PROMPT = [40, 41, 42, 43, 44, 45, 46] * 6  # two full pages and a part of one
SHORT = [40, 41, 42]
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2, 3]}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
TEXT = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
CHAT = TEXT | {"messages": [{"role": "user", "content": "hi"}]}
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

WARM = {"temperature": 1.5, "seed": 7}

# The letter j (77), and a little behind it the brace that ends an object (96).
TWO = {"77": 100, "96": 99}
# name -> body; one with `messages` is a chat's
MATRIX: dict[str, dict[str, Any]] = {
    "plain": TEXT | {"prompt": PROMPT},
    "one token": TEXT | {"prompt": PROMPT, "max_tokens": 1},
    "one-token prompt": TEXT | {"prompt": [40]},
    "a page": TEXT | {"prompt": PROMPT[:16]},
    "seed": TEXT | WARM | {"prompt": PROMPT},
    "another seed": TEXT | WARM | {"prompt": PROMPT, "seed": 8},
    "top_k 1": TEXT | WARM | {"prompt": PROMPT, "top_k": 1},
    "tiny top_p": TEXT | WARM | {"prompt": PROMPT, "top_p": 1e-6},
    "min_p 1": TEXT | WARM | {"prompt": PROMPT, "min_p": 1},
    "bias": TEXT | {"prompt": PROMPT, "logit_bias": {"77": 100}},
    "two biases": TEXT | {"prompt": PROMPT, "logit_bias": TWO},
    "presence": TEXT | {"prompt": PROMPT, "logit_bias": TWO, "presence_penalty": 2},
    "frequency": TEXT | {"prompt": PROMPT, "logit_bias": TWO, "frequency_penalty": 2},
    "repetition": TEXT | {"prompt": PROMPT, "repetition_penalty": 0.1},
    "eos first": {"prompt": PROMPT, "max_tokens": 8, "logit_bias": {str(EOS): 100}},
    "min_tokens": {
        "prompt": PROMPT,
        "max_tokens": 8,
        "temperature": 0,
        "min_tokens": 3,
        "logit_bias": {str(EOS): 100},
    },
    "stop on the first token": TEXT
    | {"prompt": PROMPT, "logit_bias": {"77": 100}, "stop_token_ids": [77]},
    "stop string across the hand-off": TEXT
    | {"prompt": PROMPT, "logit_bias": {"77": 100}, "stop": ["jj"]},
    "logprobs": TEXT | {"prompt": PROMPT, "logprobs": 3},
    "echo": TEXT | {"prompt": PROMPT, "echo": True, "logprobs": 2},
    "score": TEXT | {"prompt": PROMPT, "echo": True, "logprobs": 0, "max_tokens": 0},
    "prompt_logprobs": TEXT | {"prompt": PROMPT, "prompt_logprobs": 2},
    "n": TEXT | WARM | {"prompt": PROMPT, "n": 3, "logprobs": 1},
    "n greedy": TEXT | {"prompt": SHORT, "n": 2},
    "n of two prompts": TEXT | WARM | {"prompt": [PROMPT, SHORT], "n": 2},
    "n with bytes that are no characters": TEXT | WARM | {"prompt": SHORT, "n": 4},
    "chat": CHAT | {"logprobs": True, "top_logprobs": 2, "n": 2} | WARM,
    "json object": CHAT
    | {
        "ignore_eos": False,
        "max_tokens": 60,
        "logit_bias": {"96": 50},
        "response_format": {"type": "json_object"},
    },
    "json schema": CHAT
    | {
        "ignore_eos": False,
        "max_tokens": 60,
        "n": 2,
        "temperature": 1,
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
        "seed": 3,
    },
    "choice": CHAT | {"ignore_eos": False, "guided_choice": ["yes", "no"]},
    "regex": CHAT | {"ignore_eos": False, "guided_regex": "[ab]{3}c"},
    "two together": TEXT
    | {"prompt": PROMPT, "n": 2, "echo": True, "logprobs": 1, "presence_penalty": 1}
    | WARM,
}


def without_ids(reply: dict[str, Any]) -> dict[str, Any]:
    """What must be equal: everything but ids and times."""
    return {name: value for name, value in reply.items() if name not in ("id", "created")}


def ask(http: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    answer = http.post(path, json=body)
    assert answer.status_code == 200, f"{body}: {answer.text}"
    return without_ids(answer.json())


@pytest.fixture(scope="module")
def replies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Any]]]:
    """mode -> name -> reply; after each mode every page is back."""
    folder = tiny_llama(tmp_path_factory.mktemp("model") / "tiny")
    told: dict[str, dict[str, Any]] = {}
    for mode in ("colocated", "disaggregated"):
        with serving(small_config(folder, mode=mode), app=True) as cluster:
            assert cluster.endpoints is not None
            base = f"http://{cluster.endpoints.http}"
            with httpx.Client(base_url=base, timeout=60, trust_env=False, verify=False) as http:
                told[mode] = {name: ask(http, body) for name, body in MATRIX.items()}
            cluster.check_all_returned()
    yield told


@pytest.mark.parametrize("name", MATRIX)
def test_both_modes_give_the_same_json(replies, name: str) -> None:
    assert replies["disaggregated"][name] == replies["colocated"][name]


def texts(reply: dict[str, Any]) -> list[str]:
    return [c["message"]["content"] if "message" in c else c["text"] for c in reply["choices"]]


def test_every_feature_did_something(replies) -> None:
    told = replies["colocated"]
    (plain,) = texts(told["plain"])
    assert told["plain"]["usage"]["completion_tokens"] == 8
    assert texts(told["seed"]) != texts(told["another seed"])
    for name in ("top_k 1", "tiny top_p", "min_p 1"):
        assert texts(told[name]) == [plain], name
    (biased,) = texts(told["bias"])
    assert len(set(biased)) == 1 and len(biased) == 8
    assert texts(told["two biases"]) == [biased]
    for name in ("presence", "frequency"):
        assert set(texts(told[name])[0]) == {"j", "}"}, name
    # A factor below 1 favours what was there before.
    repeated = texts(told["repetition"])[0]
    assert repeated != plain and len(set(repeated)) < len(repeated)


def test_cached_tokens_are_those_that_nobody_computed(replies) -> None:
    for mode, told in replies.items():
        cached = {
            name: reply["usage"]["prompt_tokens_details"]["cached_tokens"]
            for name, reply in told.items()
        }
        assert cached["plain"] == 0, mode
        assert cached["seed"] == cached["n"] == 32, f"{mode}: two full pages of the same prompt"
        assert cached["one-token prompt"] == cached["a page"] == 0, mode
        assert cached["echo"] == cached["score"] == cached["prompt_logprobs"] == 0, mode


def test_ends_are_those_that_were_asked_for(replies) -> None:
    told = replies["colocated"]
    assert told["eos first"]["usage"]["completion_tokens"] == 1
    assert told["eos first"]["choices"][0]["finish_reason"] == "stop"
    assert told["min_tokens"]["usage"]["completion_tokens"] == 4
    assert told["stop on the first token"]["usage"]["completion_tokens"] == 1
    (at_once,) = told["stop on the first token"]["choices"]
    assert (at_once["finish_reason"], at_once["text"], at_once["stop_reason"]) == ("stop", "", 77)
    (stopped,) = told["stop string across the hand-off"]["choices"]
    assert (stopped["text"], stopped["stop_reason"]) == ("", "jj")
    assert told["stop string across the hand-off"]["usage"]["completion_tokens"] == 2


def test_logprobs_are_there_and_agree_with_each_other(replies) -> None:
    told = replies["colocated"]
    logprobs = told["logprobs"]["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == 8
    # Greedy: the token is the likeliest.
    for value, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert value == max(top.values()) < 0
    echoed = told["echo"]["choices"][0]["logprobs"]
    assert len(echoed["tokens"]) == len(PROMPT) + 8 and echoed["token_logprobs"][0] is None
    assert echoed["token_logprobs"][len(PROMPT) :] == pytest.approx(logprobs["token_logprobs"])
    score = told["score"]["choices"][0]
    assert score["logprobs"]["token_logprobs"][1:] == pytest.approx(
        echoed["token_logprobs"][1 : len(PROMPT)]
    )
    prompt = told["prompt_logprobs"]["choices"][0]["prompt_logprobs"]
    assert len(prompt) == len(PROMPT)
    for token, at, value in zip(PROMPT[1:], prompt[1:], echoed["token_logprobs"][1:], strict=False):
        assert at[str(token)]["logprob"] == pytest.approx(value)


def test_choices_differ_where_they_are_drawn_and_agree_where_they_are_not(replies) -> None:
    told = replies["colocated"]
    assert len(set(texts(told["n"]))) == 3
    assert texts(told["n"])[0] == texts(told["seed"])[0], "the first choice is that of n = 1"
    assert told["n"]["usage"]["completion_tokens"] == 24
    assert told["n"]["usage"]["prompt_tokens"] == len(PROMPT)
    first, second = texts(told["n greedy"])
    assert first == second
    assert texts(told["n of two prompts"])[:2] == texts(told["n"])[:2]


def test_answers_follow_their_grammars(replies) -> None:
    told = replies["colocated"]
    for text in texts(told["json schema"]):
        assert set(json.loads(text)) == {"ok", "n"}
    assert all(choice["finish_reason"] == "stop" for choice in told["json schema"]["choices"])
    assert isinstance(json.loads(texts(told["json object"])[0]), dict)
    assert texts(told["choice"])[0] in ("yes", "no")
    assert re.fullmatch("[ab]{3}c", texts(told["regex"])[0])
