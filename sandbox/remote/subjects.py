"""Streams and subjects on the broker, and what pools and workers announce there."""

import dataclasses
import hashlib
import re

from nats.js import JetStreamContext, api
from nats.js.errors import APIError

from sandbox.codec import ProtocolError
from sandbox.items import Resources

REQUESTS = "jaxpt_requests"  # to a worker each; one is deleted by its ack
REPLIES = "jaxpt_replies"  # to a pool
DEAD = "jaxpt_dead"  # requests that no worker could do anything with
PAYLOADS = "jaxpt_payloads"  # what is too large for the message that refers to it
SNAPSHOTS = "jaxpt_snapshots"

_HOUR = 3600.0
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ID = re.compile(r"[0-9a-f]{32}")
_STREAM_EXISTS_OTHERWISE = 10058


def key_of(request_id: str) -> str:
    """A request's id in subjects and headers, where an id could be anything."""
    return hashlib.sha256(request_id.encode(errors="surrogatepass")).hexdigest()[:32]


def check_id(where: str, value: str) -> None:
    """Raises ProtocolError unless it is 32 hexadecimal digits."""
    if not _ID.fullmatch(value):
        raise ProtocolError(f"{where}={value!r:.80} must be 32 hexadecimal digits.")


@dataclasses.dataclass(frozen=True)
class Subjects:
    """Those of one pool. Pools of different names share a broker and never meet."""

    pool: str

    def __post_init__(self):
        if not _NAME.fullmatch(self.pool):
            raise ValueError(
                f"pool={self.pool!r:.80} must have 1 to 64 letters, digits, '-' or '_'."
            )

    def requests(self, worker_id: str) -> str:
        return f"jaxpt.{self.pool}.requests.{worker_id}"

    def replies(self, instance: str) -> str:
        return f"jaxpt.{self.pool}.replies.{instance}"

    def dead(self) -> str:
        return f"jaxpt.{self.pool}.dead"

    def payloads(self, worker_id: str) -> str:
        """What follows says which: `.requests.KEY.N`, say."""
        return f"jaxpt.{self.pool}.payloads.{worker_id}"

    def snapshots(self) -> str:
        return f"jaxpt.{self.pool}.snapshots"

    def beats(self, whose: str) -> str:
        """whose: `worker`, `pool`, or `*` for both."""
        return f"jaxpt.{self.pool}.beats.{whose}"

    def given_up(self, worker_id: str) -> str:
        return f"jaxpt.{self.pool}.given_up.{worker_id}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerBeat:
    """A worker is there, for this instance of the pool; or it goes, for this reason."""

    worker_id: str
    instance: str
    capacity: Resources
    leaving: str = ""
    detail: str = ""

    def __post_init__(self):
        check_id("WorkerBeat.worker_id", self.worker_id)
        check_id("WorkerBeat.instance", self.instance)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolBeat:
    """A pool is there. `instance` is another one whenever it is started."""

    instance: str
    is_leaving: bool = False

    def __post_init__(self):
        check_id("PoolBeat.instance", self.instance)


async def ensure_streams(stream: JetStreamContext) -> None:
    """Makes those that are missing; one that an operator configured is left as it is."""
    queue = {"retention": api.RetentionPolicy.WORK_QUEUE, "max_age": _HOUR}
    # The last message under a subject is the one that counts.
    chunks = {"max_msgs_per_subject": 1, "allow_direct": True}
    configs = (
        api.StreamConfig(name=REQUESTS, subjects=["jaxpt.*.requests.*"], **queue),
        api.StreamConfig(name=REPLIES, subjects=["jaxpt.*.replies.*"], **queue),
        api.StreamConfig(
            name=DEAD, subjects=["jaxpt.*.dead"], max_age=7 * 24 * _HOUR, max_msgs=10_000
        ),
        api.StreamConfig(
            name=PAYLOADS, subjects=["jaxpt.*.payloads.>"], max_age=_HOUR, **chunks
        ),
        api.StreamConfig(
            name=SNAPSHOTS,
            subjects=["jaxpt.*.snapshots.>"],
            max_age=7 * 24 * _HOUR,
            **chunks,
        ),
    )
    for config in configs:
        config.storage = api.StorageType.FILE
        try:
            await stream.add_stream(config)
        except APIError as error:
            if error.err_code != _STREAM_EXISTS_OTHERWISE:
                raise
