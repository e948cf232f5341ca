"""Whether two workers can exchange KV pages: the rule behind every Transfer stream.

Pure. Owns the list of what must be equal on both sides; a difference is refused when the stream
is made, never found later as wrong text.
"""

from __future__ import annotations

from protocol.errors import PeerMismatch
from protocol.messages import Hello

PROTOCOL_VERSION = 1
_MUST_AGREE = ("protocol_version", "fingerprint", "geometry", "wire_dtype")


def check_agreement(mine: Hello, theirs: Hello) -> None:
    """Raise ``PeerMismatch``, with both values of the first difference, unless both agree."""
    for name in _MUST_AGREE:
        ours, other = getattr(mine, name), getattr(theirs, name)
        if ours != other:
            raise PeerMismatch(
                f"{name} differs: {mine.worker_id} has {ours}, {theirs.worker_id} has {other}",
                field=name,
            )
