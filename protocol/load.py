"""Reads the configuration: YAML file, environment and ``--set``, each value with its origin.

This file owns all of YAML: parsing with positions, duplicate keys, and errors in the form
``cluster.yaml:6:5: pools.prefill.replicas: ...``. What the values mean is ``protocol.config``'s.
Precedence: ``--set a.b=c`` over ``TANDEM__A__B`` over the file over the default.

Life of a load:
 1. Compose the YAML text into nodes; record the position of every key.
 2. Lay environment and ``--set`` values over the file's, noting where each came from.
 3. Validate with pydantic; turn each complaint into one line that names file, place and field.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from protocol.config import TandemConfig
from protocol.errors import ConfigError

ENV_PREFIX = "TANDEM__"

# What PyYAML raises: its own errors; a date that the calendar does not have, or a text that is
# marked as a date and is none; a nesting deeper than Python's stack.
_NOT_YAML = (yaml.YAMLError, ValueError, AttributeError, RecursionError)

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class LoadedConfig:
    """A valid configuration and where each explicitly set value came from."""

    config: TandemConfig
    origins: Mapping[str, str]  # dotted path -> "file:line:column", "env NAME" or "--set"


@dataclass
class _Layers:
    """The merged raw values, with the origin of every key that somebody set."""

    values: dict[str, Any]
    origins: dict[KeyPath, str] = field(default_factory=dict)

    def set(self, path: tuple[str, ...], value: Any, origin: str) -> None:
        """Lay one value over what is there; intermediate sections appear as needed."""
        section = self.values
        for i, key in enumerate(path[:-1]):
            below = section.setdefault(key, {})
            if not isinstance(below, dict):
                below = section[key] = {}
            self.origins.setdefault(path[: i + 1], origin)
            section = below
        section[path[-1]] = value
        self.origins[path] = origin

    def origin_of(self, path: KeyPath) -> str | None:
        """The origin of ``path`` or of its nearest ancestor that has one."""
        for length in range(len(path), -1, -1):
            found = self.origins.get(path[:length])
            if found is not None:
                return found
        return None


def load_config(
    path: str | Path,
    overrides: Iterable[str] = (),
    environ: Mapping[str, str] | None = None,
) -> TandemConfig:
    """Read and check a configuration file.

    ``overrides`` are ``a.b=c`` strings, ``environ`` usually ``os.environ``. Raises
    ``ConfigError`` with one line per fault.
    """
    return load_with_origins(path, overrides, environ).config


def load_with_origins(
    path: str | Path,
    overrides: Iterable[str] = (),
    environ: Mapping[str, str] | None = None,
) -> LoadedConfig:
    """Like ``load_config``, and says where every set value came from."""
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path}: cannot be read: {e}") from None
    layers = _read_yaml(text, str(path))
    for name, value in sorted((environ or {}).items()):
        if name.startswith(ENV_PREFIX):
            keys = tuple(k.lower() for k in name[len(ENV_PREFIX) :].split("__"))
            layers.set(keys, _scalar(value, f"environment {name}"), f"environment {name}")
    for item in overrides:
        dotted, equals, value = item.partition("=")
        keys = tuple(dotted.strip().split("."))
        if not equals or not all(keys):
            raise ConfigError(f"--set {item}: expected section.key=value")
        layers.set(keys, _scalar(value, f"--set {item}"), f"--set {item}")
    try:
        config = TandemConfig.model_validate(layers.values)
    except ValidationError as e:
        raise ConfigError(_explain(e, layers, str(path))) from None
    set_values = {".".join(map(str, p)): o for p, o in layers.origins.items() if p}
    return LoadedConfig(config, set_values)


def dump_config(config: TandemConfig) -> str:
    """The whole tree as YAML, defaults included."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def dump_value(value: Any) -> str:
    """One value as YAML writes it on one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, width=float("inf"))
    return text.removesuffix("...\n").strip()


def _scalar(text: str, origin: str) -> Any:
    try:
        return yaml.safe_load(text) if text.strip() else text
    except _NOT_YAML:
        raise ConfigError(f"{origin}: {text[:80]!r} is not a YAML value") from None


def _read_yaml(text: str, name: str) -> _Layers:
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except _NOT_YAML as e:
        mark = getattr(e, "problem_mark", None)
        place = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        problem = getattr(e, "problem", None) or str(e).splitlines()[0]
        raise ConfigError(f"{place}: not valid YAML: {problem}") from None
    layers = _Layers({}, {(): f"{name}:1:1"})
    if node is None:
        return layers
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{name}:1:1: expected sections such as 'model:', found a {_kind(node)}")
    layers.values = _construct(node, (), layers.origins, name, open_nodes=set())
    return layers


def _kind(node: yaml.Node) -> str:
    return "list" if isinstance(node, yaml.SequenceNode) else "single value"


def _construct(
    node: yaml.Node, path: KeyPath, origins: dict[KeyPath, str], name: str, open_nodes: set[int]
) -> Any:
    """Plain values of a node tree; records positions, refuses duplicate keys and cycles."""

    def place(n: yaml.Node) -> str:
        return f"{name}:{n.start_mark.line + 1}:{n.start_mark.column + 1}"

    if id(node) in open_nodes:
        raise ConfigError(f"{place(node)}: an alias contains itself")
    open_nodes.add(id(node))
    value: Any
    if isinstance(node, yaml.MappingNode):
        value = {}
        for key_node, value_node in node.value:
            key = _plain(key_node, place(key_node))
            if not isinstance(key, str):
                raise ConfigError(f"{place(key_node)}: key {key!r} is not a text")
            if key in value:
                first = origins[(*path, key)]
                raise ConfigError(f"{place(key_node)}: duplicate key {key!r}, first set at {first}")
            origins[(*path, key)] = place(key_node)
            value[key] = _construct(value_node, (*path, key), origins, name, open_nodes)
    elif isinstance(node, yaml.SequenceNode):
        value = []
        for i, item in enumerate(node.value):
            origins[(*path, i)] = place(item)
            value.append(_construct(item, (*path, i), origins, name, open_nodes))
    else:
        value = _plain(node, place(node))
    open_nodes.discard(id(node))
    return value


def _plain(node: yaml.Node, place: str) -> Any:
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_object(node, deep=True)
    except _NOT_YAML as e:
        problem = "no value of its kind" if isinstance(e, AttributeError) else e
        raise ConfigError(f"{place}: {getattr(e, 'problem', problem)}") from None
    finally:
        loader.dispose()


def _explain(error: ValidationError, layers: _Layers, name: str) -> str:
    lines = []
    for fault in error.errors(include_url=False):
        path = _strip_union_tags(fault["loc"])
        origin = layers.origin_of(path) or name
        message = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            message = f"unknown key{_did_you_mean(path)}"
        elif fault["type"] == "missing":
            message = "required, but not set"
        elif fault["type"] != "value_error":
            message = f"{message[0].lower()}{message[1:]}, not {fault['input']!r}"
        line = f"{origin}: {'.'.join(map(str, path)) or 'configuration'}: {message}"
        if line not in lines:
            lines.append(line)
    return "\n".join(lines)


def _strip_union_tags(loc: tuple[str | int, ...]) -> KeyPath:
    """Pydantic adds the union member's name to a place; the file knows only its keys."""
    model: type[BaseModel] | None = TandemConfig
    path: list[str | int] = []
    for key in loc:
        path.append(key)
        if model is None or key not in model.model_fields:
            break
        model = _section_of(model, str(key))
        if model is None and not _is_mapping_field(loc, path):
            break
    return tuple(path)


def _is_mapping_field(loc: tuple[str | int, ...], path: list[str | int]) -> bool:
    return len(path) < len(loc) and path[-1] == "custom"


def _section_of(model: type[BaseModel], key: str) -> type[BaseModel] | None:
    annotation = model.model_fields[key].annotation
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _did_you_mean(path: KeyPath) -> str:
    model: type[BaseModel] | None = TandemConfig
    for key in path[:-1]:
        model = _section_of(model, str(key)) if model else None
    known = list(model.model_fields) if model else []
    close = difflib.get_close_matches(str(path[-1]), known, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known keys here: {', '.join(known)}" if known else ""
