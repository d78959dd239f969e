"""Records as JSON and back: dataclasses as objects, bytes as base64, all else as itself.

Reading is strict: what is missing, unknown or of the wrong type is named.
"""

import base64
import dataclasses
import functools
import json
import types
import typing
from collections.abc import Mapping
from typing import Any


class ProtocolError(ValueError):
    """A record that is malformed; the message names the field."""

    message_id = ""  # of the message that it came in, where that is known


def dumps(record: Any) -> str:
    """Raises ValueError for what is no JSON value (NaN, say)."""

    def encode(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            return {
                field.name: encode(getattr(value, field.name))
                for field in dataclasses.fields(value)
            }
        if isinstance(value, bytes):
            return base64.b64encode(value).decode()
        if isinstance(value, Mapping):
            return {key: encode(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [encode(item) for item in value]
        return value

    return json.dumps(encode(record), allow_nan=False)


def loads(record_type: Any, text: str | bytes) -> Any:
    """A record of this type. Raises ProtocolError, naming the field that is wrong."""
    return decode(record_type, parse(record_type.__name__, text), record_type.__name__)


def parse(where: str, text: str | bytes) -> Any:
    """A JSON value. Raises ProtocolError."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{where}: not JSON: {error}") from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def decode(kind: Any, value: Any, where: str) -> Any:
    """`value` as `kind`, a type as records write it. Raises ProtocolError."""
    if kind is Any:
        return value
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        (kind,) = (argument for argument in arguments if argument is not type(None))
        return decode(kind, value, where)
    if kind is bool and type(value) is bool:
        return value
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise ProtocolError(f"{where} must be an object, not {value!r:.80}.")
        hints = _hints(kind)
        unknown = sorted(set(value) - set(hints))
        if unknown:
            raise ProtocolError(f"{where} has unknown fields {unknown}.")
        fields = {
            name: decode(hints[name], item, f"{where}.{name}")
            for name, item in value.items()
        }
        try:
            return typing.cast(type, kind)(**fields)
        except TypeError as error:
            raise ProtocolError(f"{where}: {error}") from error
    if kind is bytes:
        try:
            return base64.b64decode(value, validate=True)
        except (ValueError, TypeError) as error:
            raise ProtocolError(f"{where} is not base64: {error}") from error
    if origin is tuple and isinstance(value, list):
        return tuple(decode(arguments[0], item, where) for item in value)
    if origin is not None and issubclass(origin, Mapping) and isinstance(value, dict):
        return {
            key: decode(arguments[1], item, f"{where}[{key!r}]")
            for key, item in value.items()
        }
    if kind is float and type(value) in (int, float):
        return float(value)
    if kind in (int, str) and type(value) is kind:
        return value
    raise ProtocolError(f"{where} must be {kind}, not {value!r:.80}.")
