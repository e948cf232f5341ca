"""``tandem chat`` and ``tandem generate`` as a shell sees them: stdout, stderr, exit code."""

from __future__ import annotations

import io
import json
import re
import socket
import sys

import pytest
import typer
from clients.fake_core import ANSWER
from typer.testing import CliRunner

from cluster.cli import chat, generate
from cluster.cli.chat_session import ChatSession
from protocol.errors import ConfigError, InvalidArgument, Unavailable
from protocol.types import Grammar, GrammarKind

RUNNER = CliRunner()


def tandem(*arguments: str, stdin: str | bytes | None = None):
    """One command line, with errors as ``cluster.cli.main`` lets them through."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command("chat")(chat.chat)
    app.command("generate")(generate.generate)
    return RUNNER.invoke(app, arguments, input=stdin)


@pytest.fixture
def nobody() -> str:
    """An address at which nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def test_generate_prints_the_answer_and_on_request_one_short_line(served, grpc_address):
    done = tandem("generate", "hello", "--grpc", grpc_address)
    assert done.exit_code == 0
    assert done.stdout == ANSWER + "\n"
    assert done.stderr == ""  # it is no terminal
    done = tandem("generate", "hello", "--grpc", grpc_address, "--verbose")
    assert done.stdout == ANSWER + "\n"
    tokens = len(served.core.codec.encode(ANSWER))
    line = rf"\[5 -> {tokens} tokens in \d+\.\d\d s, the first after \d+\.\d\d s\]\n"
    assert re.fullmatch(line, done.stderr)


def test_generate_says_what_it_took_on_a_terminal(served, grpc_address, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", Terminal())
    app = typer.Typer()
    app.command()(generate.generate)
    app(["hello", "--grpc", grpc_address], standalone_mode=False)
    assert capsys.readouterr().out == ANSWER + "\n"
    assert sys.stderr.getvalue().startswith("[5 -> ")


def test_generate_passes_every_option_on(served, grpc_address):
    options = "--max-tokens 4 --temperature 0.5 --top-p 0.9 --top-k 3 --seed 8 --ignore-eos"
    done = tandem(
        "generate",
        "hello",
        "--grpc",
        grpc_address,
        *options.split(),
        "--stop",
        "zz",
        "--stop",
        "qq",
    )
    assert done.stdout == ANSWER[:4] + "\n"
    (request,) = served.core.requests
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (4, 0.5, 0.9)
    assert (sampling.top_k, sampling.seed, sampling.ignore_eos) == (3, 8, True)
    assert request.stop == ("zz", "qq")


def test_generate_passes_penalties_and_forms_on(served, grpc_address, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    options = (
        "--min-p 0.25 --presence-penalty 0.5 --frequency-penalty -1 --repetition-penalty 1.25 "
        f"--min-tokens 2 --json-schema @{schema}"
    )
    tandem("generate", "hello", "--grpc", grpc_address, *options.split())
    tandem("generate", "hello", "--grpc", grpc_address, "--regex", "[a-z]+")
    by_schema, by_regex = (request.sampling for request in served.core.requests)
    assert (by_schema.min_p, by_schema.presence_penalty) == (0.25, 0.5)
    assert (by_schema.frequency_penalty, by_schema.repetition_penalty) == (-1.0, 1.25)
    assert by_schema.min_tokens == 2
    assert by_schema.grammar == Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}')
    assert by_regex.grammar == Grammar(GrammarKind.REGEX, "[a-z]+")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--json-schema", "@/nowhere/at/all"], "cannot read the schema /nowhere/at/all"),
        (["--json-schema", "{}", "--regex", "a"], "contradict"),
        (["--regex", "("], "does not compile"),
    ],
)
def test_generate_names_a_form_that_cannot_be(served, grpc_address, options, says):
    done = tandem("generate", "hello", "--grpc", grpc_address, *options)
    assert isinstance(done.exception, InvalidArgument) and says in done.exception.message
    assert served.core.requests == []


def test_generate_as_json_is_one_object(served, grpc_address):
    done = tandem("generate", "hi", "--grpc", grpc_address, "--json", "--stop", "Two.")
    answer = json.loads(done.stdout)
    assert answer["text"] == ANSWER[: ANSWER.index("Two.")]
    assert answer["matched_stop"] == "Two."
    assert answer["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len(answer["token_ids"])
    assert answer["timings"][0]["worker_id"] == "prefill-0"
    assert done.stderr == ""
    done = tandem("generate", "hi", "--grpc", grpc_address, "--json", "--verbose")
    assert json.loads(done.stdout)["text"] == ANSWER
    assert done.stderr == ""


def test_generate_reads_stdin_and_can_chat(served, grpc_address):
    asked = ("--grpc", grpc_address, "--max-tokens", "1")
    assert tandem("generate", "-", *asked, stdin="from a pipe").exit_code == 0
    assert tandem("generate", "hi", "--chat", *asked).exit_code == 0
    plain, conversation = served.core.requests
    assert len(plain.prompt) == len("from a pipe")
    assert len(conversation.prompt) == len("user: hi\nassistant: ")


def test_generate_reports_refusals_and_broken_bytes(served, grpc_address):
    done = tandem("generate", "", "--grpc", grpc_address)
    assert "empty" in done.exception.message
    assert done.exception.exit_code == 2
    done = tandem("generate", "-", "--grpc", grpc_address, stdin=b"\xff\xfe")
    assert "UTF-8" in done.exception.message
    done = tandem("generate", "hold-first", "--grpc", grpc_address, "--timeout", "0.2")
    assert done.exception.reason == "DEADLINE_EXCEEDED"
    assert done.exception.message == "no complete answer within 0.2 s"
    assert done.exception.exit_code == 1
    done = tandem("generate", "hold-later", "--grpc", grpc_address, "--timeout", "0.2")
    assert done.exception.message == "no complete answer within 0.2 s"
    assert done.stdout == ANSWER[:2]


def test_a_shorter_deadline_of_the_server_is_told_as_the_servers(served, grpc_address):
    done = tandem("generate", "late-first", "--grpc", grpc_address, "--timeout", "30")
    assert done.exception.reason == "DEADLINE_EXCEEDED"
    assert done.exception.message == "the server's own 0.3 s passed"


def test_a_port_of_the_other_protocol_is_one_sentence(served):
    http, grpc = served.endpoints.http, served.endpoints.grpc
    done = tandem("generate", "hi", "--grpc", http)
    assert isinstance(done.exception, Unavailable)
    assert done.exception.message.startswith(f"nothing that speaks gRPC answers at {http};")
    assert "--url" in done.exception.message and done.exception.exit_code == 1
    done = tandem("chat", "--url", grpc, stdin="hi\n")
    assert isinstance(done.exception, Unavailable)
    assert done.exception.message.startswith(f"nothing that speaks HTTP answers at http://{grpc};")
    assert "--grpc" in done.exception.message and done.exception.exit_code == 1


@pytest.mark.parametrize("verb", ["chat", "generate"])
def test_a_server_that_is_not_there_is_one_sentence(nobody: str, verb: str):
    if verb == "chat":
        done = tandem("chat", "--url", f"http://{nobody}", stdin="hi\n")
    else:
        done = tandem("generate", "hi", "--grpc", nobody)
    assert isinstance(done.exception, Unavailable)
    assert done.exception.exit_code == 1
    assert nobody in done.exception.message and "tandem serve" in done.exception.message
    assert "\n" not in done.exception.message
    assert done.stdout == ""


def test_addresses_that_are_none(served):
    assert tandem("generate", "hi", "--grpc", "9000").exception.exit_code == 2
    assert tandem("generate", "hi", "--grpc", "http://127.0.0.1:9000").exception.exit_code == 2
    assert tandem("chat", "--url", "nonsense.invalid", stdin="hi\n").exception.exit_code == 1
    for url in ("ftp://127.0.0.1", "http://", "http://a:b"):
        done = tandem("chat", "--url", url, stdin="hi\n")
        assert isinstance(done.exception, ConfigError), url
        assert done.exception.field == "url" and url in done.exception.message


def test_chat_needs_no_scheme(served, base_url):
    for url in (served.endpoints.http, served.endpoints.http + "/v1/", base_url + "/"):
        done = tandem("chat", "--url", url, "--max-tokens", "2", stdin="hi\n")
        assert (done.exit_code, done.stdout) == (0, ANSWER[:2] + "\n"), url


def test_chat_from_a_pipe_is_one_conversation(served, base_url):
    options = ("--system", "be brief", "--max-tokens", "3", "--temperature", "0")
    done = tandem("chat", "--url", base_url, *options, stdin="first\n\n  second \n")
    assert done.exit_code == 0
    assert done.stdout == (ANSWER[:3] + "\n") * 2
    prompts = [bytes_of(served, request) for request in served.core.requests]
    opening = "system: be brief\nuser: first\nassistant: "
    assert prompts[0] == opening
    assert prompts[1] == f"{opening}{ANSWER[:3]}\nuser: second\nassistant: "


def bytes_of(served, request) -> str:
    return served.core.codec.decode(request.prompt)


def test_chat_from_a_pipe_ends_at_the_first_failure(served, base_url):
    done = tandem("chat", "--url", base_url, stdin="fail-later\nnever asked\n")
    assert done.exception.reason == "UNAVAILABLE"
    assert "decode-0 died" in done.exception.message
    assert len(served.core.requests) == 1
    done = tandem("chat", "--url", base_url, "--model", "other", stdin="hi\n")
    assert done.exception.reason == "MODEL_NOT_FOUND"


def test_a_failed_or_stopped_turn_leaves_no_trace(served, base_url):
    session = ChatSession(base_url, options={"max_tokens": 3})
    session.connect()
    for text in ("fail-first", "fail-later"):
        with pytest.raises(Unavailable, match="decode-0 died"):
            list(session.say(text))
    stopped = session.say("hold-later")
    assert next(stopped)
    stopped.close()
    assert served.core.wait_for(lambda: len(served.core.cancelled) == 1)
    assert session.messages == []
    assert "".join(session.say("hi")) == ANSWER[:3]
    assert [message["role"] for message in session.messages] == ["user", "assistant"]
    assert session.usage["completion_tokens"] == 3
    session.close()


class Terminal(io.StringIO):
    """Typed lines, from something that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def typed(monkeypatch, capsys, base_url: str, lines: str):
    """What a person sees who types ``lines``; answers are two tokens long."""
    monkeypatch.setattr(sys, "stdin", Terminal(lines))
    chat.chat(url=base_url, max_tokens=2, model=None, system=None, temperature=None, seed=None)
    return capsys.readouterr()


def test_at_a_terminal_a_failed_turn_is_told_and_the_talk_goes_on(
    served, base_url, monkeypatch, capsys
):
    shown = typed(monkeypatch, capsys, base_url, "fail-first\nhi\n/new\nagain\n")
    assert shown.out == (ANSWER[:2] + "\n") * 2
    assert "error: worker decode-0 died" in shown.err
    prompts = [bytes_of(served, request) for request in served.core.requests]
    assert prompts[1:] == ["user: hi\nassistant: ", "user: again\nassistant: "]


def test_lines_with_a_slash_are_commands(served, base_url, monkeypatch, capsys):
    lines = "/help\n/modle x\n//etc is what?\n/quit\nnever asked\n"
    shown = typed(monkeypatch, capsys, base_url, lines)
    assert shown.out == ANSWER[:2] + "\n"  # one message reached the model
    assert [bytes_of(served, r) for r in served.core.requests] == [
        "user: /etc is what?\nassistant: "
    ]
    for command in ("/new", "/help", "/quit"):
        assert f"{command}  " in shown.err
    assert "there is no command /modle; /help lists them" in shown.err
