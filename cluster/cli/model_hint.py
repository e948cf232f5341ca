"""Which command gets a model that is not there: only ones that are known, never a guess.

This file owns the hint that follows "there is no such folder". It must never fetch anything.
"""

from __future__ import annotations

import shlex
from pathlib import Path


def fetch_hint(path: str) -> str:
    """The ``tandem model fetch`` that fills this folder, or one that gets a model to try."""
    from cluster.cli.model_store import SOURCES

    folder = Path(path).expanduser()
    if folder.name not in SOURCES:
        return f"`tandem model fetch {next(iter(SOURCES))}` gets a small one"
    elsewhere = folder.parent.resolve() != Path("models").resolve()
    where = f" --models-dir {shlex.quote(str(folder.parent))}" if elsewhere else ""
    return f"`tandem model fetch {folder.name}{where}` gets it"
