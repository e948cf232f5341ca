"""What a client may know of a failure, and the counting of failures at the front.

This file owns the step from any exception to a ``TandemError``: our own causes pass, a bug
becomes an incident id that is also in the log. It must never let the words of an unknown
exception, which may hold prompt text, reach a client.
"""

from __future__ import annotations

import logging
import secrets

from protocol.errors import InternalError, TandemError
from protocol.wire.telemetry import Telemetry

RETRY_AFTER_S = 1.0  # where a repeat can help and the cause does not say when

log = logging.getLogger(__name__)


class Failures:
    """What the front ends and the core of a router make of an exception."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def known(self, error: BaseException) -> TandemError:
        """The cause to tell the client, with a time where a repeat can help."""
        if isinstance(error, TandemError):
            if error.retryable and error.retry_after_s is None:
                error.retry_after_s = RETRY_AFTER_S
            return error
        incident = secrets.token_hex(6)
        log.error("incident %s: a request failed with a bug", incident, exc_info=error)
        self._telemetry.count("errors", InternalError.reason)
        return InternalError(
            f"internal error, incident {incident}; the router's log has the details"
        )

    def refused(self, error: BaseException) -> TandemError:
        """The same for a call that ended before it became a request; counted as refused."""
        known = self.known(error)
        self._telemetry.count("rejected", known.reason.lower())
        return known
