"""``tandem chat``: talk to a running server over its OpenAI HTTP API.

stdout holds the answers and nothing else. On a terminal every line typed is a turn, Ctrl-C stops
an answer, Ctrl-D ends, and lines that begin with a slash are commands. With piped input every
line is a turn of one conversation, and the first failure ends the command.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from cluster.cli.chat_session import ChatSession

HINT = "Ctrl-C stops an answer, /help lists the commands, Ctrl-D ends."
COMMANDS = """\
/new   start a new conversation
/help  this list
/quit  end, as Ctrl-D does
//...  a message that begins with a slash"""


def chat(
    url: Annotated[str, typer.Option(help="The server's HTTP address.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Default: the one that is served.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answers.")] = None,
) -> None:
    """Chat with a running server, streaming; reads a terminal or a pipe."""
    from cluster.cli.chat_session import ChatSession

    if temperature is not None and not math.isfinite(temperature):
        from protocol.errors import InvalidArgument

        raise InvalidArgument(
            f"temperature must be a finite number, not {temperature}", field="temperature"
        )
    options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    given = {name: value for name, value in options.items() if value is not None}
    session = ChatSession(url, model=model, system=system, options=given)
    try:
        name = session.connect()
        import sys

        if sys.stdin.isatty():
            typer.echo(f"{name} at {session.url}. {HINT}", err=True)
            _talk(session)
        else:
            _read_through(session)
    finally:
        session.close()


def _talk(session: ChatSession) -> None:
    """A person at a terminal: a failed turn is told and the conversation goes on."""
    from protocol.errors import TandemError

    while True:
        try:
            text = _typed("> ")
        except EOFError:
            typer.echo(err=True)
            return
        if text == "/quit":
            return
        if text.startswith("/") and not text.startswith("//"):
            typer.echo(_command(session, text), err=True)
        elif text:
            try:
                _answer(session, text.removeprefix("/"))
            except KeyboardInterrupt:
                typer.echo("\n(stopped)", err=True)
            except TandemError as error:
                typer.echo(f"error: {error.message}", err=True)


def _command(session: ChatSession, text: str) -> str:
    """Do what a line with a slash asks for; returns what to tell about it."""
    if text == "/new":
        session.forget()
        return "(a new conversation)"
    if text == "/help":
        return COMMANDS
    return f"there is no command {text.split()[0]}; /help lists them"


def _typed(prompt: str) -> str:
    """One line from the terminal, with line editing where the platform has it."""
    import contextlib
    import sys

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (``input`` uses it once it is imported)

    if sys.stdout.isatty():
        return input(prompt).strip()
    typer.echo(prompt, nl=False, err=True)  # stdout is a file: it gets no prompts
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.strip()


def _read_through(session: ChatSession) -> None:
    """A pipe: every line that is not blank is a turn."""
    import io
    import sys

    lines = sys.stdin
    if isinstance(lines, io.TextIOWrapper):
        lines.reconfigure(encoding="utf-8", errors="replace")
    for line in lines:
        if line.strip():
            _answer(session, line.strip())


def _answer(session: ChatSession, text: str) -> None:
    from contextlib import closing

    with closing(session.say(text)) as pieces:  # type: ignore[type-var]
        for piece in pieces:
            typer.echo(piece, nl=False)
    typer.echo()
