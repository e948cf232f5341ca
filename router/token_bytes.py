"""The bytes that one token stands for, whatever the tokenizer's way of writing them.

This file owns the step from a token id to bytes for the three ways in which fast tokenizers
write pieces: GPT-2's alphabet of one character per byte, SentencePiece's ``▁`` for a space with
``<0xNN>`` for a lone byte, and plain text. It must never decode a whole answer (``router.text``
does): the bytes of a token need not be whole characters, so logprobs show them as they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from tokenizers import Tokenizer

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The vocabulary of one tokenizer as bytes. Thread-safe: nothing here is changed."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._added = {i: token.content.encode("utf-8") for i, token in added.items()}
        self.special = frozenset(i for i, token in added.items() if token.special)
        decoder = json.loads(tokenizer.to_str())["decoder"] or {}
        kinds = set(_kinds(decoder))
        self._alphabet = _byte_alphabet() if "ByteLevel" in kinds else None
        self._falls_back = "ByteFallback" in kinds
        self._space = "▁" if kinds & {"Metaspace", "Replace"} else None

    def __call__(self, token_id: int) -> bytes:
        """The token's bytes; none for an id that the tokenizer does not know."""
        if token_id in self._added:
            return self._added[token_id]
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if self._alphabet is not None and all(c in self._alphabet for c in piece):
            return bytes(self._alphabet[c] for c in piece)
        lone = _BYTE_PIECE.fullmatch(piece) if self._falls_back else None
        if lone is not None:
            return bytes([int(lone[1], 16)])
        if self._space is not None:
            piece = piece.replace(self._space, " ")
        return str(piece).encode("utf-8")


def _kinds(decoder: dict[str, object]) -> Iterator[str]:
    """The types of a decoder and, where it is a sequence, of its parts."""
    yield str(decoder.get("type"))
    parts = decoder.get("decoders")
    for part in parts if isinstance(parts, Sequence) else ():
        yield from _kinds(part)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's character of each byte: printable Latin-1 stands for itself, the rest follow 255
    in order (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners")."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(rest)}
