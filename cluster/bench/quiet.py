"""How busy this machine is with other things, so that a disturbed comparison says so itself.

Owns one figure: the share of all cores that was busy while nothing of ours should have run. It
never judges a measurement; it tells the reader when to doubt one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

# Of all cores. The arm that has just ended and Ray's own daemons account for up to a quarter of
# two cores; a single busy program of somebody else's is half of them.
DISTURBED = 0.35
_SAMPLE_S = 1.0


def busy_share(
    stat: Path = Path("/proc/stat"), sleep: Callable[[float], None] = time.sleep
) -> float | None:
    """The share (0..1) of all cores that was busy during one second; None where unknown."""
    before = _ticks(stat)
    sleep(_SAMPLE_S)
    after = _ticks(stat)
    if before is None or after is None or after[1] <= before[1]:
        return None
    idle, total = after[0] - before[0], after[1] - before[1]
    return 1 - idle / total


def _ticks(stat: Path) -> tuple[int, int] | None:
    """Idle and total processor ticks since the start of the machine."""
    try:
        first = stat.read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return None
    fields = [int(f) for f in first[1:9]]
    return fields[3] + fields[4], sum(fields)
