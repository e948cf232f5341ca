"""Text of growing answers: characters and stop strings that are split over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from protocol.errors import InternalError, InvalidArgument
from router.text import IncrementalText, TextPiece

SPECIAL = "<|end|>"
MERGES = [("a", "b"), ("s", "t"), ("Ġ", "a")]


def byte_level() -> Tokenizer:
    """Ids: 0 special, 1..256 the bytes in the alphabet's order, then two-letter merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [SPECIAL, *alphabet, *(a + b for a, b in MERGES)]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([SPECIAL])
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Words with leading-space marks and bytes as a fallback, as Llama 2 has them."""
    words = ["<unk>", "▁one", "▁two", "s", "!", *(f"<0x{b:02X}>" for b in range(256))]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


BYTES = byte_level()
N_IDS = BYTES.get_vocab_size()


def ids_of(text: str) -> list[int]:
    return list(BYTES.encode(text).ids)


def bytes_of(text: str) -> list[int]:
    """One token per byte: characters and words fall apart."""
    return [i for char in text for i in _bytes_of_char(char)]


def _bytes_of_char(char: str) -> list[int]:
    mapped = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(
        char
    )
    return [BYTES.token_to_id(letter) for letter in mapped[0][0]]


def play(
    token_ids: Sequence[int], cuts: Sequence[int] = (), **options: object
) -> tuple[str, TextPiece | None]:
    """The whole text of an answer pushed in pieces, and the piece that ended it."""
    text = IncrementalText(BYTES, **options)  # type: ignore[arg-type]
    edges = sorted({0, len(token_ids), *(c for c in cuts if c < len(token_ids))})
    said = ""
    for low, high in pairwise(edges):
        piece = text.push(token_ids[low:high])
        said += piece.text
        if piece.stop_matched is not None:
            assert text.finish() == ""
            return said, piece
    return said + text.finish(), None


def test_a_character_over_several_tokens_comes_whole() -> None:
    text = IncrementalText(BYTES)
    pieces = [text.push([i]).text for i in bytes_of("a€😀b")]
    assert pieces == ["a", "", "", "€", "", "", "", "😀", "b"]
    assert text.finish() == ""


def test_bytes_that_never_become_a_character_come_at_the_end() -> None:
    text = IncrementalText(BYTES)
    assert [text.push([i]).text for i in bytes_of("x€")[:-1]] == ["x", "", ""]
    assert text.finish() == "\ufffd"


def test_special_tokens_are_skipped_or_shown() -> None:
    assert play([*ids_of("hi"), 0])[0] == "hi"
    assert play([*ids_of("hi"), 0], skip_special_tokens=False)[0] == "hi" + SPECIAL


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    text = IncrementalText(BYTES, stop=["END"])
    assert [text.push([i]).text for i in bytes_of("aENE")] == ["a", "", "", "EN"]
    assert text.finish() == "E"


def test_a_stop_string_over_tokens_names_the_token_that_completed_it() -> None:
    text = IncrementalText(BYTES, stop=["END"])
    assert text.push(bytes_of("abE")) == TextPiece("ab")
    assert text.push(bytes_of("NDxyz")) == TextPiece("", "END", 4)
    assert text.finish() == ""
    with pytest.raises(InternalError, match="after the end"):
        text.push([5])


def test_a_stop_string_inside_one_token_cuts_its_text() -> None:
    (merged,) = ids_of("ab")
    text = IncrementalText(BYTES, stop=["a"])
    assert text.push([*bytes_of("x"), merged, *bytes_of("y")]) == TextPiece("x", "a", 1)
    text = IncrementalText(BYTES, stop=["a"], include_stop=True)
    assert text.push([*bytes_of("x"), merged, *bytes_of("y")]) == TextPiece("xa", "a", 1)


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert play(bytes_of("xabcd"), stop=["abcd", "bc"])[1] == TextPiece("xa", "bc", 3)
    assert play(bytes_of("xabcd"), stop=["c", "abc"])[1] == TextPiece("x", "abc", 3)


def test_a_stop_string_of_characters_that_are_split() -> None:
    said, end = play(bytes_of("see 😀🙂 then"), range(40), stop=["😀🙂"])
    assert said == "see " and end is not None and end.stop_token_index == 11


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidArgument) as refused:
        IncrementalText(BYTES, stop=["a", ""])
    assert refused.value.field == "stop"


def test_the_prompt_decides_about_a_leading_space() -> None:
    tokenizer = sentencepiece()
    assert IncrementalText(tokenizer).push([1, 3, 2]).text == "ones two"
    assert IncrementalText(tokenizer, prompt_ids=[2]).push([1, 3, 2]).text == " ones two"


def test_a_prompt_that_ends_inside_a_character_does_not_leak_into_the_answer() -> None:
    half = bytes_of("€")[:2]
    text = IncrementalText(BYTES, prompt_ids=[*ids_of("secret"), *half])
    assert "secret" not in text.push([*bytes_of("€")[2:], *ids_of("ok")]).text


def test_byte_fallback_characters_come_whole() -> None:
    text = IncrementalText(sentencepiece(), prompt_ids=[1])
    pieces = [text.push([5 + b]).text for b in "é".encode()]
    assert "".join(pieces) + text.push([4]).text + text.finish() == "é!"


ANY_IDS = st.lists(st.integers(0, N_IDS - 1), max_size=30)
CUTS = st.lists(st.integers(0, 30), max_size=8)


@settings(max_examples=100, deadline=None)
@given(ANY_IDS, CUTS)
def test_pieces_of_any_tokens_add_up_to_the_full_decode(ids: list[int], cuts: list[int]) -> None:
    assert play(ids, cuts)[0] == BYTES.decode(ids, skip_special_tokens=True)


WORDS = st.text(alphabet="ab€😀 ", max_size=14)
STOPS = st.lists(st.text(alphabet="ab€😀 ", min_size=1, max_size=4), min_size=1, max_size=3)


@settings(max_examples=150, deadline=None)
@given(WORDS, STOPS, CUTS, st.booleans(), st.booleans())
def test_stops_are_found_as_if_the_text_came_letter_by_letter(
    words: str, stops: list[str], cuts: list[int], include: bool, split: bool
) -> None:
    ids = bytes_of(words) if split else ids_of(words)
    said, end = play(ids, cuts, stop=stops, include_stop=include)
    # The slow, obvious reference: look at every beginning of the text.
    for n in range(len(words) + 1):
        ended = [stop for stop in stops if words[:n].endswith(stop)]
        if ended:
            stop = max(ended, key=len)
            assert said == (words[:n] if include else words[: n - len(stop)])
            assert end is not None and end.stop_matched == stop
            decoded = [BYTES.decode(ids[: i + 1]) for i in range(len(ids))]
            first = next(i for i, text in enumerate(decoded) if text.startswith(words[:n]))
            assert end.stop_token_index == first
            return
    assert end is None and said == words
