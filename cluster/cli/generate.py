"""``tandem generate``: one prompt, one answer, over gRPC.

stdout holds the answer (or, with ``--json``, one JSON object with everything that is known about
it). On a terminal, or with ``--verbose``, one line on stderr says what it took. Ctrl-C ends the
request at the server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from protocol.types import Complete
    from protocol.wire.inference_client import GenerateCall

CONNECT_S = 5.0
_LONGEST_S = 86_400  # a day


def generate(
    prompt: Annotated[str, typer.Argument(help='The prompt; "-" reads stdin.')],
    max_tokens: Annotated[int | None, typer.Option(help="Default: rest of the context.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default 1.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Share of probability to keep.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Candidates to keep; 0: all.")] = None,
    min_p: Annotated[
        float | None,
        typer.Option(help="Drop what is less likely than this share of the likeliest."),
    ] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="From -2 to 2.")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="From -2 to 2.")] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1: fewer repeats.")
    ] = None,
    min_tokens: Annotated[int | None, typer.Option(help="No end before so many.")] = None,
    json_schema: Annotated[
        str | None, typer.Option(help="The answer is JSON of this schema; @FILE reads it.")
    ] = None,
    regex: Annotated[str | None, typer.Option(help="The answer matches this.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answer.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Ends the answer; repeatable.")] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the model's end.")
    ] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Use the model's chat template.")] = False,
    grpc: Annotated[str, typer.Option(help="The server's gRPC address.")] = "127.0.0.1:9000",
    timeout: Annotated[float | None, typer.Option(help="Deadline in seconds.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Say what it took, also where stderr is a file.")
    ] = False,
) -> None:
    """Generate from one prompt by gRPC and print the answer as it comes."""
    import asyncio
    import sys

    from protocol.errors import InvalidArgument
    from protocol.wire.inference_client import GenerateCall

    if timeout is not None and not 0 < timeout < _LONGEST_S:
        raise InvalidArgument(
            f"timeout must lie between 0 and {_LONGEST_S} seconds, not {timeout}", field="timeout"
        )
    text = _stdin() if prompt == "-" else prompt
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidArgument("the prompt is not valid UTF-8", field="prompt") from error
    call = GenerateCall(
        text=None if chat else text,
        messages=[("user", text)] if chat else None,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=stop or (),
        ignore_eos=ignore_eos,
        min_p=min_p,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
        min_tokens=min_tokens,
        json_schema=_schema(json_schema),
        regex=regex,
    )
    _check_listening(grpc)
    told = not json and (verbose or sys.stderr.isatty())
    asyncio.run(_run(call, grpc, timeout, as_json=json, told=told))


async def _run(
    call: GenerateCall, address: str, timeout_s: float | None, *, as_json: bool, told: bool
) -> None:
    import json
    import time
    from contextlib import aclosing

    from protocol.types import Delta
    from protocol.wire.inference_client import InferenceClient

    token_ids: list[int] = []
    text, begin = "", time.monotonic()
    first_s: float | None = None
    async with (
        InferenceClient(address) as client,
        aclosing(client.generate(call, timeout_s)) as pieces,
    ):
        async for piece in pieces:
            if isinstance(piece, Delta):
                if first_s is None:
                    first_s = time.monotonic() - begin
                text += piece.text
                token_ids += piece.token_ids
                if not as_json:
                    typer.echo(piece.text, nl=False)
                continue
            if as_json:
                typer.echo(json.dumps(answer_json(text, token_ids, piece), ensure_ascii=False))
            else:
                typer.echo()
            if told:
                typer.echo(summary(piece, time.monotonic() - begin, first_s), err=True)


def answer_json(text: str, token_ids: list[int], end: Complete) -> dict[str, Any]:
    """The whole answer as ``--json`` prints it."""
    from dataclasses import asdict

    return {
        "text": text,
        "token_ids": token_ids,
        "finish_reason": end.finish_reason.value,
        "matched_stop": end.matched_stop,
        "usage": asdict(end.usage),
        "timings": [asdict(timing) for timing in end.timings],
    }


def summary(end: Complete, seconds: float, first_s: float | None) -> str:
    """One short line: tokens of prompt and answer, seconds in all and until the first piece."""
    usage = end.usage
    counts = f"{usage.prompt_tokens} -> {usage.completion_tokens} tokens in {seconds:.2f} s"
    return f"[{counts}]" if first_s is None else f"[{counts}, the first after {first_s:.2f} s]"


def _stdin() -> str:
    import sys

    return sys.stdin.buffer.read().decode("utf-8", errors="surrogateescape")


def _schema(given: str | None) -> str | None:
    """The schema's text: given as such, or in a file."""
    from pathlib import Path

    from protocol.errors import InvalidArgument

    if given is None or not given.startswith("@"):
        return given
    try:
        return Path(given[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(
            f"cannot read the schema {given[1:]}: {error}", field="json_schema"
        ) from error


def _check_listening(address: str) -> None:
    """A server that is not there is one sentence, at once."""
    import socket

    from protocol.errors import ConfigError, Unavailable

    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        raise ConfigError(f"{address!r} is not host:port", field="grpc")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise Unavailable(
            f"nothing answers at {address} ({error}); "
            "is a server running? start one with: tandem serve CONFIG"
        ) from error
