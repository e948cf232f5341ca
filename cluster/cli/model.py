"""``tandem model``: get a model that is known to work, ready to serve."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Models on this machine.", no_args_is_help=True)


@app.callback()
def _models() -> None:
    """Keeps ``fetch`` a sub-command although it is the only one."""


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="For example smollm2-135m.", show_default=False)],
    models_dir: Annotated[Path, typer.Option(help="Folder that holds the models.")] = Path(
        "models"
    ),
) -> None:
    """Download a model once, check it, and write it as a safetensors folder."""
    from cluster.cli.model_store import fetch as fetch_model

    path = fetch_model(name, models_dir, lambda line: typer.echo(line, err=True))
    typer.echo(str(path))
