"""The records that cross between trainer and sandbox workers, as JSON.

A `Job` runs the agent's code (`Execution`) in one sandbox and grades what it left
(`Grading`) in another; a `Result` says what came of it. Bytes travel as base64.
"""

import base64
import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

OUTCOMES = ("ok", "truncated", "policy_fail", "infra_fail", "grader_fail")


class ProtocolError(ValueError):
    """A record that is malformed; the message names the field."""


def _check_path(field: str, path: str) -> None:
    parts = PurePosixPath(path).parts
    if (
        not path
        or path != "/".join(parts)
        or path.startswith("/")
        or ".." in parts
        or len(path.encode(errors="replace")) > 255
        or any(ord(c) < 32 for c in path)
    ):
        raise ProtocolError(
            f"{field}: {path[:80]!r} must be a relative path inside the workspace, "
            "without '..' or control characters, of at most 255 bytes."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What one sandbox may use. Memory and file sizes are per process and per file.

    output_bytes: kept of stdout and of stderr, half from the head and half from the tail.
    workspace_bytes: all files of the workspace together.
    """

    wall_seconds: float = 10.0
    cpu_seconds: int = 2
    memory_bytes: int = 256 << 20
    processes: int = 16
    file_bytes: int = 16 << 20
    workspace_bytes: int = 64 << 20
    output_bytes: int = 16 << 10

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value > 0):
                raise ProtocolError(
                    f"Limits.{field.name}={value!r} must be positive and finite."
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """A command that runs in a fresh workspace holding `files`.

    "python" as the first word is the sandbox's own interpreter. `artifacts` are the files
    that cross to the grader, if the command leaves them.
    """

    command: tuple[str, ...]
    files: Mapping[str, bytes]
    stdin: bytes = b""
    artifacts: tuple[str, ...] = ()
    limits: Limits = Limits()

    def __post_init__(self):
        if not self.command:
            raise ProtocolError("Execution.command is empty.")
        for path in self.files:
            _check_path("Execution.files", path)
        for path in self.artifacts:
            _check_path("Execution.artifacts", path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grading:
    """A Python program that defines `grade(artifacts: dict[str, bytes], payload) -> dict`.

    The dict is {"components": {name: number in [0, 1]}, "why": str}. Only
    `limits.wall_seconds` and `limits.memory_bytes` bind a grader.
    """

    program: str
    payload: Any
    limits: Limits = Limits()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One episode's work. `job_id` is the idempotency key.

    With no execution nothing is run: `artifacts` go straight to the grader. Otherwise they
    join those that the execution leaves, which can't replace them.
    """

    job_id: str
    domain: str
    execution: Execution | None
    grading: Grading
    artifacts: Mapping[str, bytes] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if not self.job_id:
            raise ProtocolError("Job.job_id is empty.")
        both = set(self.artifacts) & set(self.execution.artifacts if self.execution else ())
        if both:
            raise ProtocolError(
                f"Job.artifacts and its execution's both name {sorted(both)}."
            )

    def to_json(self) -> str:
        return _dumps(self)

    @staticmethod
    def from_json(text: str | bytes) -> "Job":
        return _loads(Job, text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """What a stream carried: all of it, or its head and tail with the middle cut out."""

    head: bytes = b""
    tail: bytes = b""
    total_bytes: int = 0

    def text(self) -> str:
        cut = self.total_bytes - len(self.head) - len(self.tail)
        middle = f"\n[{cut} bytes cut]\n".encode() if cut else b""
        return (self.head + middle + self.tail).decode(errors="replace")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What came of a job.

    outcome: `ok` was graded; `policy_fail` is the agent's doing; `infra_fail` and
    `grader_fail` are ours, and carry no verdict. reason: a code such as `graded`,
    `wall_timeout`, `out_of_memory`, `worker_died`.
    seconds: `queue`, `execute` (only if something ran), `grade`.
    """

    job_id: str
    outcome: str
    reason: str
    verdict: Mapping[str, Any] | None = None
    exit_code: int | None = None
    stdout: Output = Output()
    stderr: Output = Output()
    attempts: int = 1
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if self.outcome not in OUTCOMES:
            raise ProtocolError(f"Result.outcome={self.outcome!r}: not in {OUTCOMES}.")

    def to_json(self) -> str:
        return _dumps(self)

    @staticmethod
    def from_json(text: str | bytes) -> "Result":
        return _loads(Result, text)


def _dumps(record: Any) -> str:
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


def _loads(record_type: Any, text: str | bytes) -> Any:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ProtocolError(f"{record_type.__name__}: not JSON: {error}") from error
    return _decode(record_type, value, record_type.__name__)


def _decode(kind: Any, value: Any, where: str) -> Any:
    """`value` as `kind`, a type as written in the records above."""
    if kind is Any:
        return value
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        (kind,) = (argument for argument in arguments if argument is not type(None))
        return _decode(kind, value, where)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise ProtocolError(f"{where} must be an object, not {value!r:.80}.")
        hints = typing.get_type_hints(kind)
        unknown = sorted(set(value) - set(hints))
        if unknown:
            raise ProtocolError(f"{where} has unknown fields {unknown}.")
        fields = {
            name: _decode(hints[name], item, f"{where}.{name}")
            for name, item in value.items()
        }
        try:
            return kind(**fields)
        except TypeError as error:
            raise ProtocolError(f"{where}: {error}") from error
    if kind is bytes:
        try:
            return base64.b64decode(value, validate=True)
        except (ValueError, TypeError) as error:
            raise ProtocolError(f"{where} is not base64: {error}") from error
    if origin is tuple and isinstance(value, list):
        return tuple(_decode(arguments[0], item, where) for item in value)
    if origin is not None and issubclass(origin, Mapping) and isinstance(value, dict):
        return {
            key: _decode(arguments[1], item, f"{where}[{key!r}]")
            for key, item in value.items()
        }
    if kind is float and type(value) in (int, float):
        return float(value)
    if kind in (int, str) and type(value) is kind:
        return value
    raise ProtocolError(f"{where} must be {kind}, not {value!r:.80}.")
