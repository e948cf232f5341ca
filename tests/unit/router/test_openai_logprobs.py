"""Tokens as bytes and text in logprobs: every way of writing pieces, split characters, offsets."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from protocol.types import TokenLogprobs
from router.openai_logprobs import (
    CompletionLogprobs,
    chat_logprobs,
    extend,
    prompt_logprobs,
)
from router.token_bytes import TokenBytes

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(ALPHABET)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.add_tokens([AddedToken("ünter", special=False)])
    return tokenizer


def sentence_pieces() -> Tokenizer:
    pieces = ["<unk>", "▁", "▁He", "llo", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


class Vocabulary:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.token_bytes = TokenBytes(tokenizer)
        self.special_tokens = self.token_bytes.special


VOCABULARY = Vocabulary(byte_level())
END, ADDED = 256, 257


def ids_of(text: str) -> list[int]:
    return [token for token in byte_level().encode(text).ids]


def entries(tokens: list[int], *top: tuple[int, float]) -> list[TokenLogprobs]:
    return [TokenLogprobs(token, -1.5, 4, top) for token in tokens]


@given(st.text(max_size=20))
def test_byte_level_tokens_are_the_bytes_of_the_text(text: str) -> None:
    read = VOCABULARY.token_bytes
    assert b"".join(read(token) for token in ids_of(text)) == text.encode()


def test_special_added_and_unknown_tokens() -> None:
    read = VOCABULARY.token_bytes
    assert (read(END), read(ADDED), read(9999)) == (b"<end>", "ünter".encode(), b"")
    assert read.special == {END}


def test_sentence_pieces_have_spaces_and_lone_bytes() -> None:
    read = TokenBytes(sentence_pieces())
    assert [read(i) for i in (1, 2, 3)] == [b" ", b" He", b"llo"]
    assert [read(4 + byte) for byte in (0, 65, 255)] == [b"\x00", b"A", b"\xff"]


def test_text_without_any_decoder() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a▁b": 0}, unk_token="a▁b"))
    assert TokenBytes(tokenizer)(0) == "a▁b".encode()


@given(st.text(max_size=16), st.integers(0, 16))
def test_tokens_begin_where_their_characters_do(text: str, cut: int) -> None:
    tokens = ids_of(text)
    told = CompletionLogprobs(VOCABULARY, 0, skip_special_tokens=True)
    pieces = [told.answer(entries(tokens[:cut])), told.answer(entries(tokens[cut:]))]
    extend(pieces[0], pieces[1])
    expected = [i for i, character in enumerate(text) for _ in ids_of(character)]
    if ADDED not in tokens:
        assert pieces[0]["text_offset"] == expected


def test_a_special_token_takes_the_room_that_it_is_given() -> None:
    tokens = [*ids_of("a"), END, *ids_of("b")]
    for skip, offsets in ((True, [0, 1, 1]), (False, [0, 1, 6])):
        told = CompletionLogprobs(VOCABULARY, 0, skip_special_tokens=skip)
        assert told.answer(entries(tokens))["text_offset"] == offsets
    for text, offsets in (("ab", [0, 1, 1]), ("a<end>b", [0, 1, 6])):
        told = CompletionLogprobs(VOCABULARY, 0, skip_special_tokens=True)
        prompt = told.prompt(tokens, entries(tokens[1:]), text)
        assert prompt["text_offset"] == offsets
        assert prompt["token_logprobs"] == [None, -1.5, -1.5]
        assert told.answer(entries(ids_of("c")))["text_offset"] == [len(text)]


def test_what_is_no_whole_character_is_written_as_bytes() -> None:
    first, second = ids_of("é")
    told = CompletionLogprobs(VOCABULARY, 1, skip_special_tokens=True)
    piece = told.answer(entries([first], (second, -0.5), (5, -9.0)))
    assert piece["tokens"] == ["bytes:\\xc3"]
    assert piece["top_logprobs"] == [{"bytes:\\xa9": -0.5, "bytes:\\xc3": -1.5}]
    (entry,) = chat_logprobs(entries([first], (second, -0.5)), 1, VOCABULARY)["content"]
    assert (entry["token"], entry["bytes"]) == ("\\xc3", [0xC3])
    assert entry["top_logprobs"] == [{"token": "\\xa9", "logprob": -0.5, "bytes": [0xA9]}]


@pytest.mark.parametrize("k", [0, 1, 2])
def test_json_has_no_infinity_and_as_many_as_asked_for(k: int) -> None:
    token = ids_of("a")[0]
    entry = TokenLogprobs(token, -math.inf, 9, ((token + 1, -0.5), (token, -math.inf)))
    told = CompletionLogprobs(VOCABULARY, k, skip_special_tokens=True).answer([entry])
    assert told["token_logprobs"] == [-9999.0]
    assert list(told["top_logprobs"][0].values()) == [*([-0.5] if k else []), -9999.0]
    (chat,) = chat_logprobs([entry], k, VOCABULARY)["content"]
    assert [top["logprob"] for top in chat["top_logprobs"]] == [-0.5, -9999.0][:k]
    _, prompt = prompt_logprobs([entry], k, VOCABULARY)
    assert prompt is not None
    assert [(told["logprob"], told["rank"]) for told in prompt.values()] == [
        (-9999.0, 9),
        *([(-0.5, 1)] if k else []),
    ]


def test_the_answer_begins_where_the_echoed_text_ends() -> None:
    """Some tokenizers' texts lack the first token's space; a prompt may end inside a character."""
    for tokens, text in ((ids_of(" a"), "a"), (ids_of("aé")[:2], "a\ufffd")):
        told = CompletionLogprobs(VOCABULARY, 0, skip_special_tokens=True)
        told.prompt(tokens, entries(tokens[1:]), text)
        assert told.answer(entries(ids_of("bc")))["text_offset"] == [len(text), len(text) + 1]
