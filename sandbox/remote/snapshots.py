"""Snapshots on the broker, so that a session goes on on another machine."""

import json
import uuid
from typing import Any

from sandbox import codec
from sandbox.remote.broker import Broker
from sandbox.remote.payloads import Chunks, Reference
from sandbox.remote.subjects import SNAPSHOTS, Subjects, check_id, key_of


class NatsStore:
    """A `snapshots.SnapshotStore`: those of one pool, whichever of its instances.

    Under a snapshot's subject is the place of its archive, so that it is replaced whole.
    They are deleted after a week.
    """

    def __init__(self, broker: Broker, subjects: Subjects):
        self._broker = broker
        self._chunks = Chunks(broker, SNAPSHOTS)
        self._prefix = subjects.snapshots()

    async def put(self, snapshot_id: str, archive: bytes, state: Any) -> None:
        """Raises ProtocolError if it is too large, BrokerUnreachable."""
        subject = f"{self._prefix}.{key_of(snapshot_id)}"
        old = await self._place(subject)
        head = json.dumps({"id": snapshot_id, "state": state}).encode()
        place = uuid.uuid4().hex
        reference = await self._chunks.put(f"{subject}.{place}", head + b"\n" + archive)
        await self._broker.store(subject, f"{place} {reference}".encode())
        if old is not None:
            await self._chunks.delete(f"{subject}.{old[0]}")

    async def get(self, snapshot_id: str) -> tuple[bytes, Any]:
        """Raises KeyError; PayloadMissing or BrokerUnreachable if it can't be had now."""
        subject = f"{self._prefix}.{key_of(snapshot_id)}"
        found = await self._place(subject)
        if found is None:
            raise KeyError(snapshot_id)
        data = await self._chunks.get(f"{subject}.{found[0]}", found[1])
        head, _, archive = data.partition(b"\n")
        known = codec.parse("snapshot", head)
        if not isinstance(known, dict) or known.get("id") != snapshot_id:
            raise KeyError(snapshot_id)
        return archive, known.get("state")

    async def delete(self, snapshot_id: str) -> None:
        subject = f"{self._prefix}.{key_of(snapshot_id)}"
        await self._broker.purge(SNAPSHOTS, subject)
        await self._broker.purge(SNAPSHOTS, f"{subject}.>")

    async def _place(self, subject: str) -> tuple[str, Reference] | None:
        said = await self._broker.last(SNAPSHOTS, subject)
        if said is None:
            return None
        place, _, reference = said.decode(errors="replace").partition(" ")
        check_id("a snapshot's place", place)
        return place, Reference.parse(reference)
