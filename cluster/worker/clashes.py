"""Refuses to run beside a foreign distribution that has the name of one of our packages.

Our import packages have plain names. A distribution of such a name (PyPI has some) would shadow
ours or be shadowed, and transformers reads the version of one called ``kernels``: the faults that
follow are far from their cause. So it is said at the start, in one sentence.
"""

from __future__ import annotations

from importlib import metadata

from protocol.errors import ConfigError

OURS = (
    "protocol",
    "kernels",
    "kv_transfer",
    "prefill_worker",
    "decode_worker",
    "router",
    "cluster",
)


def refuse_clashes() -> None:
    """Raise ``ConfigError`` naming the first foreign distribution, and the remedy."""
    for name in OURS:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        raise ConfigError(
            f"the package {name} {version} is installed and clashes with Tandem's own {name}; "
            f"`pip uninstall {name}`, or install Tandem into an environment of its own"
        )
