"""Bytes that are too large for one message, in chunks under subjects of a stream."""

import asyncio
import dataclasses
import hashlib
import re

from sandbox.codec import ProtocolError
from sandbox.remote.broker import Broker, BrokerUnreachable

INLINE_BYTES = 512 << 10  # a message may hold; NATS itself takes 1 MiB, headers and all
MAX_BYTES = 256 << 20
_AT_A_TIME = 4  # chunks on their way
_REFERENCE = re.compile(r"([0-9]{1,10}) ([0-9]{1,10}) ([0-9a-f]{64})")


class PayloadMissing(RuntimeError):
    """It is not there, or not whole; it may be later on."""


@dataclasses.dataclass(frozen=True)
class Reference:
    """What was stored, to find it whole or not at all. `digest` is SHA-256 in hex."""

    size: int
    chunk_bytes: int
    digest: str

    def __str__(self) -> str:
        return f"{self.size} {self.chunk_bytes} {self.digest}"

    @classmethod
    def parse(cls, text: str) -> "Reference":
        """Raises ProtocolError."""
        match = _REFERENCE.fullmatch(text)
        if match is None:
            raise ProtocolError(f"{text!r:.80} refers to no payload.")
        size, chunk_bytes = int(match[1]), int(match[2])
        if not 0 < chunk_bytes <= size <= MAX_BYTES or size / chunk_bytes > 1 << 16:
            raise ProtocolError(f"A payload of {size} bytes, {chunk_bytes} in a chunk.")
        return cls(size, chunk_bytes, match[3])


class Chunks:
    """Payloads in one stream; each has a subject, and its chunks those below it."""

    def __init__(self, broker: Broker, stream: str):
        self._broker = broker
        self._stream = stream

    @property
    def inline_bytes(self) -> int:
        """The most to put into one message, with room for headers."""
        return min(INLINE_BYTES, self._broker.client.max_payload // 2)

    async def put(self, subject: str, data: bytes) -> Reference:
        """Stores it, however long that takes; again under the same subject is no harm."""
        if len(data) > MAX_BYTES:
            raise ProtocolError(f"{len(data)} bytes are more than {MAX_BYTES}.")
        size = min(self.inline_bytes, len(data))
        view = memoryview(data)
        room = asyncio.Semaphore(_AT_A_TIME)

        async def store(number: int) -> None:
            async with room:
                chunk = bytes(view[number * size : (number + 1) * size])
                await self._broker.store(f"{subject}.{number}", chunk)

        async with asyncio.TaskGroup() as group:
            for number in range(-(-len(data) // size)):
                group.create_task(store(number))
        digest = await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())
        return Reference(len(data), size, digest)

    async def get(self, subject: str, reference: Reference) -> bytes:
        """Raises PayloadMissing."""
        data = bytearray(reference.size)
        room = asyncio.Semaphore(_AT_A_TIME)

        async def load(number: int) -> None:
            async with room:
                chunk = await self._broker.last(self._stream, f"{subject}.{number}")
            if chunk is None:
                raise PayloadMissing(f"{subject}.{number} is not there.")
            begin = number * reference.chunk_bytes
            if len(chunk) != min(reference.chunk_bytes, reference.size - begin):
                raise PayloadMissing(f"{subject}.{number} has {len(chunk)} bytes.")
            data[begin : begin + len(chunk)] = chunk

        try:
            async with asyncio.TaskGroup() as group:
                for number in range(-(-reference.size // reference.chunk_bytes)):
                    group.create_task(load(number))
        except* (BrokerUnreachable, PayloadMissing) as errors:
            raise PayloadMissing(str(errors.exceptions[0])) from errors
        digest = await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())
        if digest != reference.digest:
            raise PayloadMissing(f"{subject} is not what was stored there.")
        return bytes(data)

    async def delete(self, subject: str) -> None:
        await self._broker.purge(self._stream, f"{subject}.*")
