"""``tandem config``: check a file, show what is in force and why, print the JSON Schema."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Check, show and describe configurations.", no_args_is_help=True)

ConfigFile = Annotated[Path, typer.Argument(help="The YAML file.", show_default=False)]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override one value; repeatable.")
]


@app.command()
def check(file: ConfigFile, set_: SetOption = None) -> None:
    """Say whether a file is valid; every fault with file, line, column and field.

    A model folder that is not on this machine is no fault of the file: it is noted on stderr, and
    the exit code stays 0.
    """
    from cluster.cli.model_hint import fetch_hint
    from cluster.control.checks import missing_model, on_this_machine
    from protocol.load import load_config

    config = load_config(file, set_ or (), os.environ)
    typer.echo(f"{file}: valid")
    if on_this_machine(config) and (missing := missing_model(config)):
        typer.echo(f"note: {missing} ({fetch_hint(config.model.path)})", err=True)


@app.command()
def show(
    file: ConfigFile,
    set_: SetOption = None,
    origin: Annotated[bool, typer.Option(help="Say where each value comes from.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Print every value in force, defaults included."""
    from protocol.load import dump_config, dump_value, load_with_origins

    loaded = load_with_origins(file, set_ or (), os.environ)
    if origin:
        values = _leaves(loaded.config.model_dump(mode="json"))
        rows = {k: (v, loaded.origins.get(k, "default")) for k, v in values.items()}
        if as_json:
            typer.echo(json.dumps({k: {"value": v, "origin": o} for k, (v, o) in rows.items()}))
        else:
            lines = [(f"{k}: {dump_value(v)}", source) for k, (v, source) in rows.items()]
            width = max(len(line) for line, _ in lines)
            for line, source in lines:
                typer.echo(f"{line:<{width}}  # {source}")
    elif as_json:
        typer.echo(loaded.config.model_dump_json())
    else:
        typer.echo(dump_config(loaded.config), nl=False)


@app.command()
def schema() -> None:
    """Print the JSON Schema of the configuration file."""
    from protocol.config import TandemConfig

    typer.echo(json.dumps(TandemConfig.model_json_schema(), indent=2))


def _leaves(tree: dict[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            flat.update(_leaves(value, f"{path}."))
        else:
            flat[path] = value
    return flat
