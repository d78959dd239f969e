"""Hands requests to a worker process, and its durable snapshots to the broker and back.

The process has no network, so snapshots are handed over by a folder that both know.
"""

import asyncio
import weakref
from collections.abc import Callable
from pathlib import Path

from sandbox.codec import ProtocolError
from sandbox.local_workers import WorkerLink
from sandbox.sessions import Failed, Forget, Open, Reply, Request, TakeSnapshot
from sandbox.snapshots import FolderStore, SnapshotStore


class Handover:
    """Requests to `child`, which keeps durable snapshots in `folder`.

    store: where they are kept for good.
    """

    def __init__(self, child: WorkerLink, folder: str | Path, store: SnapshotStore):
        self._child = child
        self._folder = FolderStore(folder)
        self._store = store
        self._fetching: weakref.WeakValueDictionary[str, asyncio.Lock] = (
            weakref.WeakValueDictionary()
        )

    async def request(
        self, request_id: str, request: Request, handing_on: Callable[[str], None]
    ) -> Reply:
        """The reply; `handing_on` is told under which id the child gets the request.

        Done again under the same id, it goes on where it failed. Raises WorkerLost if no
        reply will come, and what the store raises.
        """
        if isinstance(request, Forget):
            await self._store.delete(request.snapshot_id)
        handing_on(request_id)
        reply = await self._child.request(request_id, request)
        if isinstance(request, TakeSnapshot) and request.durable:
            return await self._stored(request.snapshot_id, reply)
        if isinstance(request, Open) and _is_unknown(reply):
            return await self._open_fetched(request_id, request, handing_on, reply)
        return reply

    async def _stored(self, snapshot_id: str, reply: Reply) -> Reply:
        if isinstance(reply, Failed):
            return reply
        try:
            archive, state = await self._folder.get(snapshot_id)
        except KeyError:
            return reply  # stored already: the request came again since its reply was lost
        try:
            await self._store.put(snapshot_id, archive, state)
        except ProtocolError as error:
            reply = Failed(reason="no_space", detail=f"The snapshot is too large: {error}")
        await self._folder.delete(snapshot_id)
        return reply

    async def _open_fetched(
        self,
        request_id: str,
        request: Open,
        handing_on: Callable[[str], None],
        reply: Reply,
    ) -> Reply:
        """The child has the snapshot no longer, or never had it.

        Of many that ask at a time the first fetches it for all.
        """
        lock = self._fetching.setdefault(request.snapshot_id, asyncio.Lock())
        was_first = not lock.locked()
        async with lock:
            # The child does a request once: what is asked again has another id.
            if not was_first:
                handing_on(f"{request_id}/again")
                reply = await self._child.request(f"{request_id}/again", request)
                if not _is_unknown(reply):
                    return reply
            try:
                archive, state = await self._store.get(request.snapshot_id)
            except KeyError:
                return reply
            await self._folder.put(request.snapshot_id, archive, state)
            handing_on(f"{request_id}/fetched")
            try:
                return await self._child.request(f"{request_id}/fetched", request)
            finally:
                await self._folder.delete(request.snapshot_id)


def _is_unknown(reply: Reply) -> bool:
    return isinstance(reply, Failed) and reply.reason == "snapshot_unknown"
