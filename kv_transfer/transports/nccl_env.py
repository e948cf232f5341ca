"""The environment that NCCL and torch's NCCL process group must find, set before torch loads.

This file owns those variables and nothing else; it imports no torch, so that a worker's entry
can call it first. A variable that the operator has set is left alone.
"""

from __future__ import annotations

import sys
from collections.abc import MutableMapping
from typing import Final

# A link's errors are the link's alone. Without these, torch's watchdog thread ends the process
# when an operation fails or takes long, and its monitor when the watchdog itself is slow.
NCCL_ENVIRONMENT: Final[dict[str, str]] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    # Creation and abort return at once and are waited for with our own deadline.
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",
    # A transfer must leave the device's processors to the model.
    "NCCL_MAX_P2P_NCHANNELS": "4",
}


def prepare_nccl_environment(environment: MutableMapping[str, str], interface: str) -> None:
    """Set what is not set yet; data sockets bind to the network device ``interface``.

    ``interface`` is a device's name as NCCL wants it (``eth0``, ``lo``), empty for NCCL's choice.
    Raises ``RuntimeError`` when torch is loaded already, because it may have read the old values.
    """
    wanted = dict(NCCL_ENVIRONMENT)
    if interface:
        wanted["NCCL_SOCKET_IFNAME"] = f"={interface}"
    missing = {name: value for name, value in wanted.items() if name not in environment}
    if missing and "torch" in sys.modules:
        raise RuntimeError(
            "the NCCL environment must be prepared before torch is imported; missing: "
            + ", ".join(sorted(missing))
        )
    environment.update(missing)
