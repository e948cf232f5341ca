"""``tandem status``: the state of a running cluster, as a table or as JSON."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from protocol.status import ClusterStatus

_ASK_S = 5.0
_WIDE = 100  # columns of a terminal that has room for addresses


def status(
    config: Annotated[
        Path | None, typer.Argument(help="The cluster's YAML file.", show_default=False)
    ] = None,
    grpc: Annotated[
        str | None, typer.Option(help="gRPC address of a router, instead of a file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show pools, workers, loads and addresses."""
    addresses, secret = _find(config, grpc)
    found = _ask(addresses, secret)
    typer.echo(json.dumps(dataclasses.asdict(found)) if as_json else _table(found), nl=as_json)


def _ask(addresses: tuple[str, ...], secret: str) -> ClusterStatus:
    """The answer of the first of these that answers."""
    from protocol.errors import Unavailable
    from protocol.wire.clients import AdminClient

    fault = ""
    for address in addresses:
        client = AdminClient(address, secret, call_s=_ASK_S)
        try:
            return client.status()
        except Unavailable as error:
            fault = fault or error.message
        finally:
            client.close()
    raise Unavailable(f"no cluster answers at {addresses[0]}: {fault}")


def _find(config: Path | None, grpc: str | None) -> tuple[tuple[str, ...], str]:
    """The gRPC addresses to ask, router before controller, and the secret they want to hear."""
    from cluster.control import records
    from protocol.errors import InvalidArgument, Unavailable
    from protocol.load import load_config

    known = [r for r in records.load_all() if r.grpc]
    if grpc is not None:
        record = next((r for r in known if grpc in (r.grpc, r.admin)), None)
        return (grpc,), record.secret if record else ""
    if config is not None:
        name = load_config(config, (), os.environ).name
        known = [r for r in known if r.name == name]
        if not known:
            raise Unavailable(f"no cluster named {name!r} runs; `tandem serve {config}` starts it")
    if not known:
        raise Unavailable("no cluster runs; `tandem serve CONFIG` starts one")
    if len(known) > 1:
        names = ", ".join(r.name for r in known)
        raise InvalidArgument(f"several clusters run ({names}): give the YAML file or --grpc")
    return (known[0].grpc, known[0].admin), known[0].secret


def _table(found: ClusterStatus) -> str:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    with console.capture() as text:
        up = int(found.uptime_s)
        console.print(
            f"{found.cluster}: {found.model}, {found.mode}, up {up // 3600}h{up % 3600 // 60:02}m"
            f"{up % 60:02}s"
        )
        workers = Table(box=None, padding=(0, 1), pad_edge=False)
        for name in ("worker", "role", "state", "run", "wait", "move", "KV pages", "step", "pid"):
            workers.add_column(name, no_wrap=True)
        if wide := console.width >= _WIDE:
            workers.add_column("endpoint", no_wrap=True)
        for w in found.workers:
            load = w.load
            cells = [w.worker_id, w.role, w.state, load.running, load.waiting, load.transferring]
            cells.append(f"{load.total_pages - load.free_pages}/{load.total_pages}")
            step = f"{load.step_s * 1000:.0f} ms" if load.step_s else "-"  # none has run yet
            cells += [step, w.pid, *([w.endpoint] if wide else ())]
            workers.add_row(*map(str, cells))
        console.print(workers)
        for r in found.routers:
            where = f"  http://{r.http}/v1  gRPC {r.grpc}" if r.http else ""
            console.print(f"{r.router_id}: {r.state}{where}", soft_wrap=True)
        for note in found.notes[-5:]:
            line = f"{note.age_s:.0f} s ago: {note.text}"
            console.print(line, markup=False, soft_wrap=True)
    return text.get()
