"""What is asked of a worker and what it answers, as JSON.

A session is a workspace with a persistent shell, for an episode of many turns. Each request
has an id: a request that comes a second time is answered as it was the first, and not done
again, so that a message may be delivered twice but a command runs once.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from sandbox import codec
from sandbox.codec import ProtocolError
from sandbox.protocol import Grading, Job, Limits, Ran, Result, check_path

MAX_SCRIPT_BYTES = 64 << 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Open:
    """Begins a session, with an empty workspace or where a snapshot was taken.

    limits: of the session as a whole; those of a script come with it.
    """

    session_id: str
    domain: str
    limits: Limits = Limits()
    image: str = ""
    snapshot_id: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exec:
    """Runs a script in the session's shell; `wall_seconds` and `output_bytes` bind."""

    session_id: str
    script: str
    wall_seconds: float = 30.0
    output_bytes: int = 16 << 10

    def __post_init__(self):
        size = len(self.script.encode(errors="surrogateescape"))
        if "\0" in self.script or size > MAX_SCRIPT_BYTES:
            raise ProtocolError(
                f"Exec.script has {size} bytes; it may have {MAX_SCRIPT_BYTES} and no NUL. "
                "Put the text in a file."
            )
        Limits(wall_seconds=self.wall_seconds, output_bytes=self.output_bytes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WriteFiles:
    """Writes files into the workspace; folders are made as needed."""

    session_id: str
    files: Mapping[str, bytes]

    def __post_init__(self):
        for path in self.files:
            check_path("WriteFiles.files", path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadFiles:
    """Reads regular files of at most `max_bytes` each; no links are followed."""

    session_id: str
    paths: tuple[str, ...]
    max_bytes: int = 16 << 20

    def __post_init__(self):
        for path in self.paths:
            check_path("ReadFiles.paths", path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TakeSnapshot:
    """Keeps the workspace as it is under `snapshot_id`, with a state to find again.

    state: any JSON value, such as the conversation so far. keep_processes: see
    `Sandbox.snapshot`. durable: also outside of the worker, to outlive it.
    """

    session_id: str
    snapshot_id: str
    state: Any = None
    keep_processes: bool = False
    durable: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fork:
    """Begins another session where this one is; `keep_processes` is for this one."""

    session_id: str
    new_session_id: str
    keep_processes: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grade:
    """Kills the session's processes, then grades these files of its workspace."""

    session_id: str
    artifacts: tuple[str, ...]
    grading: Grading

    def __post_init__(self):
        for path in self.artifacts:
            check_path("Grade.artifacts", path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Close:
    """Ends a session; one that is not known is ended already."""

    session_id: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forget:
    """Lets go of a snapshot, in the worker and in the store."""

    snapshot_id: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Runs a job from its beginning to its verdict, with no session."""

    job: Job


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cancel:
    """Ends the request of this id, if it still runs; it is answered `cancelled`."""

    request_id: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Done:
    """There is nothing to say. state: of the snapshot that a session began from."""

    state: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Files:
    """The files that could be read, and of each of the others the reason."""

    contents: Mapping[str, bytes]
    unread: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failed:
    """The request was not done; `reason` is a code, `detail` for people.

    Reasons: `bad_request`, `session_unknown`, `sandbox_died`, `sandbox_failed`, `no_space`,
    `cancelled`, `snapshot_unknown`.
    """

    reason: str
    detail: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Beat:
    """A worker is alive, and has this many sessions and requests that run."""

    sessions: int
    running: int


Request = (
    Open
    | Exec
    | WriteFiles
    | ReadFiles
    | TakeSnapshot
    | Fork
    | Grade
    | Close
    | Forget
    | Run
    | Cancel
)
Reply = Done | Ran | Files | Result | Failed | Beat


def envelope(record: Request | Reply, message_id: str) -> bytes:
    """A line of JSON: the record, its type's name, and an id that the reply repeats."""
    message = {"id": message_id, "type": type(record).__name__, "body": record}
    return codec.dumps(message).encode()


def opened(line: bytes, kinds: Any) -> tuple[str, Any]:
    """The id and the record of an envelope whose type is one of `kinds`, a union.

    Raises:
      ProtocolError: it is malformed; with the id, if it has one, as `message_id`.
    """
    value = codec.parse("message", line)
    known = {kind.__name__: kind for kind in kinds.__args__}
    message_id = value.get("id") if isinstance(value, dict) else None
    try:
        if not isinstance(message_id, str) or set(value) != {"id", "type", "body"}:
            raise ProtocolError("A message has the fields id, type and body.")
        if value["type"] not in known:
            raise ProtocolError(f"Type {value['type']!r:.80} is not in {sorted(known)}.")
        kind = known[value["type"]]
        return message_id, codec.decode(kind, value["body"], kind.__name__)
    except ProtocolError as error:
        error.message_id = message_id if isinstance(message_id, str) else ""
        raise
