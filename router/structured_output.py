"""What an HTTP client says about the form of its answer, read: one grammar or none.

This file owns OpenAI's ``response_format`` and vLLM's ``structured_outputs`` and ``guided_*``
fields. It must never compile a grammar (the ``Intake`` has that done); it refuses wrong types,
what is not supported, and two grammars at once, each by the field's path.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from protocol.errors import InvalidArgument
from protocol.types import Grammar, GrammarKind
from router.json_fields import wrong_type

MAX_CHOICE_TEXTS = 1024
_SCHEMA_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def grammar_of(body: dict[str, Any]) -> tuple[Grammar | None, str]:
    """The grammar that the body asks for, and the path of the field that says so."""
    found: list[tuple[Grammar, str]] = []
    for field, read in _FIELDS.items():
        value = body.get(field)
        if value is not None:
            found += read(value, field)
    if len(found) > 1:
        (_, first), (_, second), *_ = found
        raise InvalidArgument(
            f"{second} contradicts {first}: an answer follows one grammar", field=second
        )
    return found[0] if found else (None, "response_format")


Found = list[tuple[Grammar, str]]


def _response_format(value: Any, field: str) -> Found:
    if not isinstance(value, dict):
        raise wrong_type(field, "an object", value)
    kind = value.get("type")
    if kind == "text":
        return []
    if kind == "json_object":
        return [(Grammar(GrammarKind.JSON_OBJECT), field)]
    if kind == "json_schema":
        return _wrapped_schema(value.get("json_schema"), f"{field}.json_schema")
    raise InvalidArgument(
        f"{field}.type is {_told(kind)}; it must be text, json_object or json_schema",
        field=f"{field}.type",
    )


def _wrapped_schema(value: Any, field: str) -> Found:
    """OpenAI's wrapper around a schema; ``strict`` asks for what is always done here."""
    if not isinstance(value, dict):
        raise wrong_type(field, "an object", value)
    name = value.get("name")
    if not isinstance(name, str) or not _SCHEMA_NAME.fullmatch(name):
        raise InvalidArgument(
            f"{field}.name must be 1 to 64 letters, digits, _ or -", field=f"{field}.name"
        )
    if not isinstance(value.get("strict"), bool | None):
        raise wrong_type(f"{field}.strict", "true or false", value["strict"])
    schema = value.get("schema")
    if not isinstance(schema, dict):
        raise wrong_type(f"{field}.schema", "an object", schema)
    return [(schema_grammar(schema, f"{field}.schema"), f"{field}.schema")]


def _structured_outputs(value: Any, field: str) -> Found:
    if not isinstance(value, dict):
        raise wrong_type(field, "an object", value)
    found: Found = []
    for name, inner in value.items():
        path = f"{field}.{name}"
        if inner is None or inner is False:
            continue
        if name == "json_object" and inner is True:
            found.append((Grammar(GrammarKind.JSON_OBJECT), path))
        elif name in _KINDS:
            found += _KINDS[name](inner, path)
        else:
            raise InvalidArgument(f"{_shown(path)} is not supported by this server", field=field)
    return found


def _schema(value: Any, field: str) -> Found:
    return [(schema_grammar(value, field), field)]


def schema_grammar(value: Any, field: str) -> Grammar:
    """The grammar of a JSON schema: an object, or the JSON text of one."""
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        if not isinstance(schema, dict):
            raise wrong_type(field, "a JSON schema (an object, or the text of one)", schema)
        return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    except RecursionError as error:
        raise InvalidArgument(f"{field} is nested too deeply", field=field) from error
    except ValueError as error:
        raise InvalidArgument(f"{field} is not valid JSON: {error}", field=field) from error


def _text_of(kind: GrammarKind) -> Callable[[Any, str], Found]:
    def read(value: Any, field: str) -> Found:
        if not isinstance(value, str):
            raise wrong_type(field, "a string", value)
        if not value:
            raise InvalidArgument(f"{field} is empty", field=field)
        return [(Grammar(kind, value), field)]

    return read


def _choice(value: Any, field: str) -> Found:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise InvalidArgument(f"{field} must be a list of strings", field=field)
    return [(choice_grammar(value, field), field)]


def choice_grammar(texts: list[str], field: str) -> Grammar:
    """The grammar of an answer that is one of ``texts``."""
    if not texts:
        raise InvalidArgument(f"{field} is empty: give at least one string", field=field)
    if len(texts) > MAX_CHOICE_TEXTS:
        raise InvalidArgument(
            f"{field} holds {len(texts)} strings; at most {MAX_CHOICE_TEXTS} are allowed",
            field=field,
        )
    if "" in texts:
        raise InvalidArgument(f"{field} holds an empty string", field=field)
    return Grammar(GrammarKind.CHOICE, json.dumps(texts))


def _told(value: Any) -> str:
    return repr(value)[:64] if isinstance(value, str) and value.isascii() else "no known name"


def _shown(path: str) -> str:
    return path[:64] if path.isascii() else "a field of it"


_KINDS: dict[str, Callable[[Any, str], Found]] = {
    "json": _schema,
    "regex": _text_of(GrammarKind.REGEX),
    "choice": _choice,
    "grammar": _text_of(GrammarKind.LARK),
}
_FIELDS: dict[str, Callable[[Any, str], Found]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
} | {f"guided_{name}": read for name, read in _KINDS.items()}
