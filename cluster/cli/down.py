"""``tandem down``: end a cluster of this user, whoever started it and however that ended."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer


def down(
    config: Annotated[
        Path | None,
        typer.Argument(help="The YAML file it was started with.", show_default=False),
    ] = None,
    name: Annotated[str | None, typer.Option(help="The cluster's name, without a file.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every cluster of this user.")] = False,
) -> None:
    """Remove exactly this cluster's actors, and the Ray that was started for it.

    Without a file or a name: the one cluster that runs.
    """
    from cluster.control import records
    from cluster.control.teardown import take_down
    from protocol.errors import InvalidArgument
    from protocol.load import load_config

    if all_:
        names = [record.name for record in records.load_all()]
    elif name is not None:
        names = [name]
    elif config is not None:
        names = [load_config(config, (), os.environ).name]
    else:
        names = [record.name for record in records.load_all()]
        if len(names) > 1:
            raise InvalidArgument(
                f"several clusters run ({', '.join(names)}): give the YAML file, --name or --all"
            )
    if not names:
        typer.echo("no cluster runs", err=True)
    for each in names:
        record = records.load(each)
        if record is None:
            typer.echo(f"{each}: nothing runs", err=True)
            continue
        ended = take_down(record)
        typer.echo(f"{each}: ended {'; '.join(ended)}" if ended else f"{each}: nothing ran")
