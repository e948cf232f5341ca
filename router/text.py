"""Text and token ids: the tokenizer of the served model, and answers turned into text as they grow.

This file owns encoding, chat templates, incremental decoding and the matching of stop *strings*
(the router is the only place that has text). It must never decide where a request runs, and it
never does I/O after the tokenizer is loaded. Everything here is synchronous; a front that encodes
a very long prompt should do so in a thread.

Life of an ``IncrementalText`` (one per answer):
 1. ``push`` for every run of new tokens, in order; text that may be the beginning of a stop
    string, or of a character whose bytes are split over tokens, is held back.
 2. After a ``push`` that reports ``stop_matched`` the object is finished: the rest is dropped.
 3. Otherwise ``finish`` once, after the last token: what was held back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from kernels.gguf_folder import model_folder
from protocol.errors import ConfigError, InternalError, InvalidArgument
from protocol.types import Request
from router.token_bytes import TokenBytes

REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 8  # end of the prompt that the decoder sees, so that a leading space is right


@dataclass(frozen=True, slots=True)
class TextPiece:
    """What one ``push`` made known.

    ``text`` may be released to the client. ``stop_matched`` is the stop string that ended the
    answer; ``stop_token_index`` is then the index within the answer of the token that completed
    it (tokens after it are dropped and not counted), and ``text`` ends just before the stop
    string, or just after it where the client asked to have it included.
    """

    text: str
    stop_matched: str | None = None
    stop_token_index: int | None = None


class IncrementalText:
    """The text of one growing answer."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        """``prompt_ids`` is the prompt (its last few tokens are enough).

        Raises ``InvalidArgument`` for an empty stop string.
        """
        if any(not s for s in stop):
            raise InvalidArgument("a stop string must not be empty", field="stop")
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._skip_special = skip_special_tokens
        context = list(prompt_ids[-CONTEXT_TOKENS:])
        if self._decode(context).endswith(REPLACEMENT):
            context = []  # a prompt that ends inside a character gives no usable context
        self._stream = self._new_stream(context)
        self._emitted_ids = context  # tokens whose text has left the decode stream
        self._pending_ids: list[int] = []  # tokens whose text it still keeps
        self._held = ""  # decoded, but may be the beginning of a stop string
        self._n_tokens = 0
        self._over = False

    def push(self, token_ids: Sequence[int]) -> TextPiece:
        """Take in the next tokens of the answer and return the text that they release."""
        if self._over:
            raise InternalError("text was pushed after the end of its answer")
        released = ""
        for token_id in token_ids:
            self._n_tokens += 1
            self._held += self._step(token_id)
            match = self._first_stop()
            if match is not None:
                start, end, stop = match
                self._over = True
                released += self._held[: end if self._include_stop else start]
                self._held = ""
                return TextPiece(released, stop, self._n_tokens - 1)
            keep = self._possible_stop_length()
            cut = len(self._held) - keep
            released += self._held[:cut]
            self._held = self._held[cut:]
        return TextPiece(released)

    def finish(self) -> str:
        """The text held back, now that no token follows. Empty after a matched stop string."""
        if self._over:
            return ""
        self._over = True
        rest, self._held = self._held + self._undecoded(), ""
        return rest

    def _step(self, token_id: int) -> str:
        self._pending_ids.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception as error:
            # The text of earlier tokens changed when this one was added, which some decoders do
            # for byte sequences that are no characters. What was released stays; go on from here.
            if "prefix" not in str(error).lower():
                raise InternalError(f"the tokenizer cannot decode token {token_id}") from error
            self._stream = self._new_stream([])
            text = self._stream.step(self._tokenizer, token_id)
        if text is None:
            return ""
        self._emitted_ids, self._pending_ids = self._pending_ids, []
        return str(text)

    def _undecoded(self) -> str:
        """Text of the tokens that the decode stream keeps: bytes that are no whole character."""
        if not self._pending_ids:
            return ""
        before = self._decode(self._emitted_ids)
        after = self._decode(self._emitted_ids + self._pending_ids)
        return after[len(before) :] if after.startswith(before) else self._decode(self._pending_ids)

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=self._skip_special))

    def _new_stream(self, context: list[int]) -> DecodeStream:
        return DecodeStream(ids=context, skip_special_tokens=self._skip_special)

    def _first_stop(self) -> tuple[int, int, str] | None:
        """The stop string that is complete first, however the text was cut into tokens."""
        found = [
            (start + len(stop), start, stop)
            for stop in self._stop
            if (start := self._held.find(stop)) >= 0
        ]
        if not found:
            return None
        end, start, stop = min(found)
        return start, end, stop

    def _possible_stop_length(self) -> int:
        """Length of the longest end of the held text that a stop string begins with."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest


class TextCodec:
    """The served model's tokenizer and chat template. Thread-safe: nothing here is changed."""

    def __init__(self, model_path: str | Path) -> None:
        """Load from a Hugging Face folder or a GGUF file. Raises ``ConfigError`` when there is no
        usable one."""
        # Imported here: it takes seconds, and only a running router needs it.
        from transformers import AutoTokenizer

        folder = model_folder(model_path)
        try:
            loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:
            raise ConfigError(f"cannot load the tokenizer of {model_path}: {error}") from error
        backend = getattr(loaded, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise ConfigError(f"the tokenizer of {model_path} has no fast (tokenizers) form")
        self._template = loaded
        self._tokenizer = backend
        self._token_bytes = TokenBytes(backend)

    @property
    def has_chat_template(self) -> bool:
        """Whether ``chat`` can work for this model."""
        return bool(self._template.chat_template)

    @property
    def special_tokens(self) -> frozenset[int]:
        """Ids of the tokens that are no text of an answer's."""
        return self._token_bytes.special

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for; they need not be whole characters."""
        return self._token_bytes(token_id)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of a plain prompt, with the model's own special tokens around it."""
        # A batch of one: unlike ``encode`` it lets go of the interpreter lock, so that a long
        # prompt read in a thread stops nobody's stream.
        batch = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        return tuple(batch[0].ids)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Token ids of a conversation, by the model's chat template.

        ``messages`` are ``{"role": ..., "content": ...}``. Raises ``InvalidArgument`` naming
        ``messages`` when the model has no template or the template refuses them.
        """
        if not messages:
            raise InvalidArgument("messages must not be empty", field="messages")
        if not self.has_chat_template:
            raise InvalidArgument(
                "this model has no chat template; use completions with a plain prompt",
                field="messages",
            )
        try:
            text = self._template.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=True,
            )
        except Exception as error:
            raise InvalidArgument(
                f"the model's chat template refused the messages: {error}", field="messages"
            ) from error
        # The template has written the special tokens already.
        return self.encode(str(text), add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence of token ids."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def decoder_for(self, request: Request) -> IncrementalText:
        """A fresh ``IncrementalText`` for the answer to this request."""
        return IncrementalText(
            self._tokenizer,
            stop=request.stop,
            include_stop=request.include_stop_str_in_output,
            skip_special_tokens=request.skip_special_tokens,
            prompt_ids=request.prompt,
        )
