"""Typed reading of a JSON object that a client sent: a wrong type names its field.

This file owns what counts as an integer, a number, a string or a boolean (a boolean is never a
number; null is "not given"). It must never know what a field means.
"""

from __future__ import annotations

import json
import math
from typing import Any

from protocol.errors import InvalidArgument


def parse_json(raw: bytes) -> dict[str, Any]:
    """The JSON object in ``raw``; ``InvalidArgument`` for anything else.

    Python reads NaN and Infinity, which are not JSON: refused, with the field where they stand.
    """
    constants: list[str] = []

    def remember(name: str) -> float:
        constants.append(name)
        return float(name)

    try:
        body = json.loads(raw, parse_constant=remember)
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"the body is not UTF-8: {error.reason}") from error
    except RecursionError as error:
        raise InvalidArgument("the body is nested too deeply") from error
    except ValueError as error:  # JSONDecodeError, and numbers of thousands of digits
        raise InvalidArgument(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidArgument(f"the body must be a JSON object, not {kind(body)}")
    if constants:
        # A name that UTF-8 cannot write (half a surrogate pair) could not be sent back either.
        field = next((k for k, v in body.items() if _is_not_finite(v) and k.isascii()), None)
        place = f"{field} is {constants[0]}" if field else f"it holds {constants[0]}"
        raise InvalidArgument(f"the body is not valid JSON: {place}", field=field)
    return body


def _is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def is_integer(value: Any) -> bool:
    """An integer, and not a boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def integer(body: dict[str, Any], field: str) -> int | None:
    """The integer at ``field``; None where it is absent or null."""
    value = body.get(field)
    if value is not None and not is_integer(value):
        raise wrong_type(field, "an integer", value)
    return value


def number(body: dict[str, Any], field: str) -> float | None:
    """The number at ``field``; None where it is absent or null."""
    value = body.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(field, "a number", value)
    try:
        return float(value)
    except OverflowError as error:
        raise InvalidArgument(f"{field} is too large", field=field) from error


def boolean(body: dict[str, Any], field: str, default: bool, prefix: str = "") -> bool:
    """The boolean at ``field``. ``prefix`` is the path of ``body`` in errors."""
    value = body.get(field)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise wrong_type(prefix + field, "true or false", value)
    return value


def string(body: dict[str, Any], field: str) -> str | None:
    """The string at ``field``; None where it is absent or null."""
    value = body.get(field)
    if value is not None and not isinstance(value, str):
        raise wrong_type(field, "a string", value)
    return value


def wrong_type(field: str, wanted: str, value: Any) -> InvalidArgument:
    """The error for a value of another type than ``wanted``."""
    return InvalidArgument(f"{field} must be {wanted}, not {kind(value)}", field=field)


def kind(value: Any) -> str:
    """A JSON value's type, in words."""
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string"}
    names |= {list: "a list", dict: "an object", type(None): "null"}
    return names[type(value)]
