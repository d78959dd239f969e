"""The work of one episode that ends with a single program, and what came of it.

A `Job` runs the agent's code (`Execution`) in one sandbox and grades what it left
(`Grading`) in another; a `Result` says what came of it. Episodes of many turns have a
session instead: see `sessions.py`.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from sandbox import codec
from sandbox.codec import ProtocolError

OUTCOMES = ("ok", "truncated", "policy_fail", "infra_fail", "grader_fail")

_MAX_COMMAND_BYTES = 64 << 10  # the kernel takes no word above 128 KiB
_MAX_ENTRIES = 1024  # files and folders that an execution may bring


def check_path(field: str, path: str) -> None:
    """Raises ProtocolError unless `path` names a file inside a workspace."""
    parts = PurePosixPath(path).parts
    if (
        not path
        or path != "/".join(parts)
        or path.startswith("/")
        or ".." in parts
        or not _is_utf8(path)
        or len(path.encode()) > 255
        or any(ord(c) < 32 for c in path)
    ):
        raise ProtocolError(
            f"{field}: {path[:80]!r} must be a relative path inside the workspace, "
            "without '..' or control characters, of at most 255 bytes of UTF-8."
        )


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What one sandbox may use. Memory and file sizes are per process and per file.

    Where control groups can be made, `memory_bytes` also bounds all its processes together.
    output_bytes: kept of stdout and of stderr, half from the head, half from the tail.
    workspace_bytes: all files of the workspace together, those of its snapshots included.
    cpus: processors' worth of time that all processes get together.
    gpus: whole ones; only on workers whose backend has some to give.
    """

    wall_seconds: float = 10.0
    cpu_seconds: int = 2
    cpus: float = 1.0
    gpus: int = 0
    memory_bytes: int = 256 << 20
    processes: int = 16
    file_bytes: int = 16 << 20
    workspace_bytes: int = 64 << 20
    output_bytes: int = 16 << 10

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            numbers = (int, float) if field.type is float else (int,)
            if field.name == "gpus" and type(value) is int and value >= 0:
                continue
            if type(value) not in numbers or not 0 < value < math.inf:
                raise ProtocolError(
                    f"Limits.{field.name}={value!r} must be a positive, finite "
                    f"{'number' if field.type is float else 'integer'}."
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Usage:
    """What a command used; 0 where the backend can't tell.

    memory_bytes: the peak of all its processes, or of its largest where nothing counts all.
    processes: the most that were seen alive. workspace_bytes: in files, at its end.
    """

    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    memory_bytes: int = 0
    processes: int = 0
    workspace_bytes: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """A command that runs in a fresh workspace holding `files`.

    "python" as the first word is the sandbox's own interpreter. `artifacts` are the
    files that the command must leave; they cross to the grader.
    """

    command: tuple[str, ...]
    files: Mapping[str, bytes]
    stdin: bytes = b""
    artifacts: tuple[str, ...] = ()
    limits: Limits = Limits()

    def __post_init__(self):
        # What can't be run is refused here: found only by a worker, it would count as a
        # failure of the infrastructure, which costs an agent nothing.
        if not self.command:
            raise ProtocolError("Execution.command is empty.")
        if any("\0" in word or not _is_utf8(word) for word in self.command):
            raise ProtocolError("Execution.command must be UTF-8 without NUL.")
        size = sum(len(word.encode()) for word in self.command)
        if size > _MAX_COMMAND_BYTES:
            raise ProtocolError(
                f"Execution.command has {size} bytes, more than {_MAX_COMMAND_BYTES}; "
                "put the text in a file."
            )
        folders: set[str] = set()
        for path in self.files:
            check_path("Execution.files", path)
            folders |= {str(parent) for parent in PurePosixPath(path).parents}
        if both := sorted(folders & set(self.files)):
            raise ProtocolError(f"Execution.files: {both} are files and folders.")
        if len(self.files) + len(folders) > _MAX_ENTRIES:
            raise ProtocolError(
                f"Execution.files has {len(self.files)} files in {len(folders)} "
                f"folders, more than {_MAX_ENTRIES}."
            )
        # A file system in memory holds whole pages.
        size = sum(-(-len(data) // 4096) * 4096 for data in self.files.values())
        if size > self.limits.workspace_bytes:
            raise ProtocolError(
                f"Execution.files take {size} bytes, more than "
                f"Limits.workspace_bytes={self.limits.workspace_bytes}."
            )
        for path in self.artifacts:
            check_path("Execution.artifacts", path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grading:
    """A Python program that defines `grade(artifacts, payload) -> dict`.

    It gets {name: bytes} and the payload, any JSON value, and returns
    {"components": {name: number in [0, 1]}, "why": str}. Only
    `limits.wall_seconds` and `limits.memory_bytes` bind a grader.
    """

    program: str
    payload: Any
    limits: Limits = Limits()

    def __post_init__(self):
        if not _is_utf8(self.program):
            raise ProtocolError("Grading.program must be UTF-8.")
        try:
            json.dumps(self.payload, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ProtocolError(f"Grading.payload is no JSON value: {error}") from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One episode's work. `job_id` is the idempotency key.

    With no execution nothing is run: `artifacts` go straight to the grader. Otherwise
    they join those that the execution leaves, which can't replace them.
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
        return codec.dumps(self)

    @staticmethod
    def from_json(text: str | bytes) -> "Job":
        """Raises ProtocolError, naming the field that is wrong."""
        return codec.loads(Job, text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """What a stream carried: all of it, or its head and tail without the middle."""

    head: bytes = b""
    tail: bytes = b""
    total_bytes: int = 0

    def text(self) -> str:
        cut = self.total_bytes - len(self.head) - len(self.tail)
        middle = f"\n[{cut} bytes cut]\n".encode() if cut else b""
        return (self.head + middle + self.tail).decode(errors="replace")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ran:
    """How a command ended; reason is None if it exited with 0 before any limit.

    reason: `wall_timeout`, `cpu_timeout`, `out_of_memory`, `killed_by_signal_N` or
    `nonzero_exit`. shell_kept: whether a session's shell lives on with its variables,
    functions and folder.
    """

    reason: str | None
    exit_code: int | None
    stdout: Output = Output()
    stderr: Output = Output()
    usage: Usage = Usage()
    shell_kept: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What came of a job.

    outcome: `ok` was graded; `policy_fail` is the agent's doing; `infra_fail` and
    `grader_fail` are ours, and carry no verdict. reason: a code such as `graded`,
    `wall_timeout`, `out_of_memory`, `worker_died`.
    seconds: `queue`, `acquire` and `execute` (only if something ran), `grade`, `deliver`.
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
    usage: Usage = Usage()

    def __post_init__(self):
        if self.outcome not in OUTCOMES:
            raise ProtocolError(f"Result.outcome={self.outcome!r}: not in {OUTCOMES}.")

    def to_json(self) -> str:
        return codec.dumps(self)

    @staticmethod
    def from_json(text: str | bytes) -> "Result":
        """Raises ProtocolError, naming the field that is wrong."""
        return codec.loads(Result, text)
