"""The ``tandem`` command: registers one verb per file and turns failures into exit codes.

This file owns the exit codes (0 good, 1 failed, 2 usage, 130 interrupted) and the one-sentence
form of every error. Verb files import nothing heavy at module level, so that ``--help`` answers
at once; stdout is data, stderr is progress.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from cluster.cli import bench, chat, config, demo, down, generate, model, serve, status
from protocol.errors import TandemError

app = typer.Typer(
    help="An LLM server that never freezes a user's stream.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("serve")(serve.serve)
app.command("down")(down.down)
app.command("status")(status.status)
app.command("chat")(chat.chat)
app.command("generate")(generate.generate)
app.command("demo")(demo.demo)
app.add_typer(bench.app, name="bench")
app.add_typer(config.app, name="config")
app.add_typer(model.app, name="model")


def _tell_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"tandem {version('tandem-serve')}")
        raise typer.Exit


@app.callback()
def _tandem(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_tell_version, is_eager=True),
    ] = False,
) -> None:
    """Options that need no verb."""


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command line; returns its exit code. Verbs end early with ``typer.Exit(code)``."""
    command = typer.main.get_command(app)
    _name_no_type_of_flags(command)
    try:
        command.main(args=arguments, prog_name="tandem")
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else 0
    except TandemError as e:
        # Several faults of one file come as lines: they stand below each other.
        typer.echo("error: " + e.message.replace("\n", "\n       "), err=True)
        return e.exit_code
    return 0


def _name_no_type_of_flags(command: Any) -> None:
    """A flag takes no value: its help must not show ``<bool>``."""
    for parameter in command.get_params(typer.Context(command)):
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    for verb in getattr(command, "commands", {}).values():
        _name_no_type_of_flags(verb)


if __name__ == "__main__":
    main()
