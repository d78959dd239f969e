"""Requests and replies as messages: small ones whole, large ones by reference."""

import dataclasses
from typing import Literal

from nats.aio.msg import Msg

from sandbox.remote.broker import Broker
from sandbox.remote.payloads import Chunks, Reference
from sandbox.remote.subjects import DEAD, PAYLOADS, Subjects, check_id

Kind = Literal["requests", "replies"]

_KEY, _WORKER, _PAYLOAD = "Jaxpt-Key", "Jaxpt-Worker", "Jaxpt-Payload"


@dataclasses.dataclass(frozen=True)
class Letter:
    """A message that is ready to be posted, as often as it takes."""

    subject: str
    body: bytes
    headers: dict[str, str]


class Mail:
    """Writes, posts and reads the messages of one pool.

    A message is known by its worker and the key of its request: it is in its stream once.
    """

    def __init__(self, broker: Broker, subjects: Subjects):
        self._broker = broker
        self._subjects = subjects
        self._chunks = Chunks(broker, PAYLOADS)

    async def write(
        self, kind: Kind, subject: str, worker_id: str, key: str, data: bytes
    ) -> Letter:
        """Raises ProtocolError if it is too large."""
        headers = {"Nats-Msg-Id": f"{worker_id}/{key}", _KEY: key, _WORKER: worker_id}
        if len(data) > self._chunks.inline_bytes:
            place = self._place(kind, worker_id, key)
            headers[_PAYLOAD] = str(await self._chunks.put(place, data))
            data = b""
        return Letter(subject, data, headers)

    async def post(self, letter: Letter) -> None:
        """Returns once it is in its stream, however long the broker is away."""
        await self._broker.store(letter.subject, letter.body, letter.headers)

    def address(self, message: Msg) -> tuple[str, str]:
        """Worker and key. Raises ProtocolError."""
        headers = message.headers or {}
        worker_id, key = headers.get(_WORKER, ""), headers.get(_KEY, "")
        check_id(_WORKER, worker_id)
        check_id(_KEY, key)
        return worker_id, key

    async def read(self, kind: Kind, message: Msg) -> bytes:
        """Raises ProtocolError, PayloadMissing."""
        reference = (message.headers or {}).get(_PAYLOAD)
        if reference is None:
            return message.data
        place = self._place(kind, *self.address(message))
        return await self._chunks.get(place, Reference.parse(reference))

    async def discard(self, kind: Kind, message: Msg) -> None:
        """Deletes the payload that it refers to, if any."""
        if _PAYLOAD in (message.headers or {}):
            await self._chunks.delete(self._place(kind, *self.address(message)))

    async def bury(self, message: Msg, reason: str, detail: str) -> None:
        """Puts a copy to the dead letters, with the reason as a header."""
        headers = {
            name: value
            for name, value in (message.headers or {}).items()
            if name.startswith("Jaxpt-")
        }
        headers |= {
            "Nats-Msg-Id": f"{DEAD}/{message.metadata.stream}/"
            f"{message.metadata.sequence.stream}",
            "Jaxpt-Reason": reason,
            "Jaxpt-Detail": " ".join(detail.split())[:500],
            "Jaxpt-Subject": message.subject,
            "Jaxpt-Deliveries": str(message.metadata.num_delivered),
        }
        await self._broker.store(self._subjects.dead(), message.data, headers)

    def _place(self, kind: Kind, worker_id: str, key: str) -> str:
        return f"{self._subjects.payloads(worker_id)}.{kind}.{key}"
