"""The served model's tokenizer and chat template, as transformers loads them from a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from protocol.errors import ConfigError, InvalidArgument
from protocol.types import Request, SamplingParams
from router.text import TextCodec

TEMPLATE = (
    "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<s>{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def folder(path: Path, template: str | None = TEMPLATE) -> Path:
    words = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    tokenizer.save(str(path / "tokenizer.json"))
    about: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    if template is not None:
        about["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(about))
    return path


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return TextCodec(folder(tmp_path_factory.mktemp("model")))


def test_a_prompt_gets_the_models_special_tokens_once(codec: TextCodec) -> None:
    ids = codec.encode("hé")
    assert ids[0] == 0 and ids.count(0) == 1 and len(ids) == 4
    assert codec.encode("hé", add_special_tokens=False) == ids[1:]
    assert codec.decode(ids) == "hé"
    assert codec.decode(ids, skip_special_tokens=False) == "<s>hé"


def test_a_chat_is_what_the_template_writes(codec: TextCodec) -> None:
    ids = codec.chat([{"role": "user", "content": "hi"}])
    assert codec.decode(ids, skip_special_tokens=False) == "<s>user:hi\nassistant:"


@pytest.mark.parametrize(
    ("messages", "what"),
    [([], "empty"), ([{"role": "tool", "content": "x"}], "no tools here")],
)
def test_what_the_template_refuses_is_the_clients_mistake(
    codec: TextCodec, messages: list[dict[str, str]], what: str
) -> None:
    with pytest.raises(InvalidArgument, match=what) as refused:
        codec.chat(messages)
    assert refused.value.field == "messages"


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    codec = TextCodec(folder(tmp_path, None))
    assert not codec.has_chat_template
    with pytest.raises(InvalidArgument, match="no chat template"):
        codec.chat([{"role": "user", "content": "hi"}])


def test_the_decoder_of_a_request_follows_its_wishes(codec: TextCodec) -> None:
    request = Request(
        "r",
        codec.encode("a"),
        SamplingParams(8),
        stop=("x",),
        include_stop_str_in_output=True,
        skip_special_tokens=False,
    )
    piece = codec.decoder_for(request).push([1, *codec.encode("oxy", add_special_tokens=False)])
    assert (piece.text, piece.stop_matched, piece.stop_token_index) == ("</s>ox", "x", 2)


def test_a_folder_without_a_tokenizer_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        TextCodec(tmp_path)
