"""One life of a worker on the network: from its announcement to its farewell.

A worker process does the requests; it has no network. This one, its parent, takes them from
the broker, hands them on, and keeps each unacknowledged until its reply is in its stream.
"""

import asyncio
import collections
import contextlib
import dataclasses
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

from nats.aio.msg import Msg

from sandbox import codec
from sandbox.codec import ProtocolError
from sandbox.items import Resources
from sandbox.remote.broker import Broker, log
from sandbox.remote.handover import Handover
from sandbox.remote.mail import Mail
from sandbox.remote.payloads import PayloadMissing
from sandbox.remote.puller import Puller
from sandbox.remote.subjects import REQUESTS, PoolBeat, Subjects, WorkerBeat, key_of
from sandbox.sessions import Cancel, Failed, Reply, Request, envelope, opened
from sandbox.workers import WorkerLost

_BEAT_SECONDS = 1.0
_ACK_SECONDS = 5.0  # for a request without a sign of progress, which each beat gives
MAX_DELIVERIES = 3
_AGAIN_SECONDS = 0.5
_DONE_KEPT = 65_536
_REPLY_BYTES_KEPT = 64 << 20
_FAREWELL_SECONDS = 3.0


@dataclasses.dataclass
class _Running:
    """A request at work. messages: those that brought it, by their place in the stream."""

    messages: dict[int, Msg]
    handed_on: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    child_id: str = ""  # as the worker process knows it


class Life:
    """Of the worker process behind `handover`, for one instance of a pool.

    silent_beats: own beats heard over the broker, but none of the pool's, before the pool
      counts as gone, and its sessions with it.
    """

    def __init__(
        self,
        broker: Broker,
        subjects: Subjects,
        instance: str,
        capacity: Resources,
        handover: Handover,
        *,
        silent_beats: int = 60,
    ):
        self.worker_id = uuid.uuid4().hex
        self._broker = broker
        self._subjects = subjects
        self._instance = instance
        self._capacity = capacity
        self._handover = handover
        self._silent_beats = silent_beats
        self._missed_beats = 0
        self._is_beat_out = False
        self._mail = Mail(broker, subjects)
        self._running: dict[str, _Running] = {}
        self._done: collections.OrderedDict[str, bytes | None] = collections.OrderedDict()
        self._bytes_kept = 0
        self._tasks: set[asyncio.Task] = set()
        self._ended: asyncio.Future[WorkerLost] = asyncio.get_running_loop().create_future()

    def end(self, reason: str, detail: str = "") -> None:
        if not self._ended.done():
            self._ended.set_result(WorkerLost(reason, detail))

    async def run(self) -> WorkerLost:
        """Until `end`, or the pool is gone or gives it up; why."""
        client = self._broker.client
        puller = Puller(
            self._broker,
            REQUESTS,
            f"worker_{self.worker_id}",
            self._subjects.requests(self.worker_id),
            self._take,
            ack_seconds=_ACK_SECONDS,
        )
        subscriptions = [
            await client.subscribe(self._subjects.beats("*"), cb=self._heard),
            await client.subscribe(
                self._subjects.given_up(self.worker_id), cb=self._given_up
            ),
        ]
        self._spawn(puller.run())
        self._spawn(self._beat())
        lost = WorkerLost("worker_stopped")
        try:
            lost = await self._ended
        finally:
            for task in self._tasks:
                task.cancel()
            with contextlib.suppress(Exception):
                async with asyncio.timeout(_FAREWELL_SECONDS):
                    await self._farewell(lost)
                    for subscription in subscriptions:
                        await subscription.unsubscribe()
        return lost

    async def _farewell(self, lost: WorkerLost) -> None:
        """So that the pool need not wait for its silence."""
        await self._announce(leaving=lost.reason, detail=str(lost)[-2000:])
        name = f"worker_{self.worker_id}"
        await self._broker.delete_consumer(REQUESTS, name)
        await self._broker.purge(REQUESTS, self._subjects.requests(self.worker_id))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("worker %s gives up", self.worker_id, exc_info=error)
            self.end("worker_died", repr(error))

    async def _announce(self, **leaving: str) -> None:
        beat = WorkerBeat(
            worker_id=self.worker_id,
            instance=self._instance,
            capacity=self._capacity,
            **leaving,
        )
        await self._broker.announce(
            self._subjects.beats("worker"), codec.dumps(beat).encode()
        )

    async def _beat(self) -> None:
        while True:
            self._is_beat_out = True
            await self._announce()
            for running in list(self._running.values()):
                for message in list(running.messages.values()):
                    await _settle(message.in_progress)
            await asyncio.sleep(_BEAT_SECONDS)

    async def _heard(self, message: Msg) -> None:
        try:
            if message.subject == self._subjects.beats("worker"):
                beat = codec.loads(WorkerBeat, message.data)
                if beat.worker_id == self.worker_id and self._is_beat_out:
                    self._is_beat_out = False
                    self._missed_beats += 1
                    if self._missed_beats > self._silent_beats:
                        self.end("pool_silent", f"in {self._silent_beats} beats")
                return
            beat = codec.loads(PoolBeat, message.data)
            if beat.instance == self._instance:
                self._missed_beats = 0
                if beat.is_leaving:
                    self.end("pool_closed")
        except ValueError as error:
            log.warning("dropped what came under %s: %s", message.subject, error)

    async def _given_up(self, message: Msg) -> None:
        self.end("given_up", "the pool did not hear of it")

    def _take(self, message: Msg) -> None:
        """Begins what the message asks for, unless that has begun already."""
        try:
            worker_id, key = self._mail.address(message)
            if worker_id != self.worker_id:
                raise ProtocolError(f"It is for worker {worker_id}.")
        except ProtocolError as error:
            self._spawn(self._bury(message, "malformed", str(error)))
            return
        if key in self._running:
            place = message.metadata.sequence.stream
            self._running[key].messages[place] = message
        elif key in self._done:
            self._spawn(self._answer_again(key, message))
        elif message.metadata.num_delivered > MAX_DELIVERIES:
            detail = f"delivered {MAX_DELIVERIES} times, and not done"
            self._spawn(self._bury(message, "max_deliveries", detail, key))
        else:
            running = _Running({message.metadata.sequence.stream: message})
            self._running[key] = running
            self._spawn(self._do(key, running, message))

    async def _do(self, key: str, running: _Running, message: Msg) -> None:
        """A request from its message to its reply; if that can't be, it comes again."""
        try:
            data = await self._mail.read("requests", message)
            request_id, request = opened(data, Request)
            if key_of(request_id) != key:
                raise ProtocolError(f"The request {request_id!r:.80} has another's key.")
            reply = await self._reply(request_id, request, running)
        except ProtocolError as error:
            del self._running[key]
            await self._bury(message, "malformed", str(error), key)
            return
        except WorkerLost as lost:
            self.end(lost.reason, str(lost))
            return
        except Exception as error:
            level = log.warning if isinstance(error, PayloadMissing) else log.exception
            level("a request could not be done: %r", error)
            del self._running[key]
            for message in running.messages.values():
                await _settle(lambda message=message: message.nak(delay=_AGAIN_SECONDS))
            return
        finally:
            running.handed_on.set()
        reply_data = envelope(reply, request_id)
        await self._send(key, reply_data)
        self._keep(key, reply_data)
        del self._running[key]
        for message in running.messages.values():
            await _settle(message.ack)
        await self._mail.discard("requests", message)

    async def _reply(self, request_id: str, request: Request, running: _Running) -> Reply:
        if isinstance(request, Cancel):
            target = self._running.get(key_of(request.request_id))
            if target is not None:
                await target.handed_on.wait()
                request = Cancel(request_id=target.child_id or request.request_id)

        def handing_on(child_id: str) -> None:
            running.child_id = child_id
            # The request itself is written in this turn of the loop or the next.
            asyncio.get_running_loop().call_soon(running.handed_on.set)

        return await self._handover.request(request_id, request, handing_on)

    async def _send(self, key: str, data: bytes) -> None:
        """Returns once the reply is in its stream."""
        subject = self._subjects.replies(self._instance)
        try:
            letter = await self._mail.write("replies", subject, self.worker_id, key, data)
        except ProtocolError as error:
            failed = envelope(Failed(reason="reply_too_large", detail=str(error)), "")
            letter = await self._mail.write("replies", subject, self.worker_id, key, failed)
        await self._mail.post(letter)

    def _keep(self, key: str, data: bytes | None) -> None:
        """For a request that comes again; its reply too, while there is room."""
        self._done[key] = data
        self._bytes_kept += len(data or b"")
        for old, kept in list(self._done.items()) if self._is_full() else ():
            if not self._is_full():
                break
            self._bytes_kept -= len(kept or b"")
            self._done[old] = None
            if len(self._done) > _DONE_KEPT:
                del self._done[old]

    def _is_full(self) -> bool:
        return self._bytes_kept > _REPLY_BYTES_KEPT or len(self._done) > _DONE_KEPT

    async def _answer_again(self, key: str, message: Msg) -> None:
        """For a request that came again since its ack, or its reply, was lost."""
        if (data := self._done.get(key)) is not None:
            await self._send(key, data)
        await _settle(message.ack)

    async def _bury(self, message: Msg, reason: str, detail: str, key: str = "") -> None:
        """A request that can't be done: to the dead letters; the pool hears of it."""
        log.warning("%s: a request under %s: %s", reason, message.subject, detail)
        await self._mail.bury(message, reason, detail)
        if key:
            code = "bad_request" if reason == "malformed" else reason
            await self._send(key, envelope(Failed(reason=code, detail=detail), ""))
            self._keep(key, None)
        await _settle(message.term)


async def _settle(acknowledge: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    """Sends it; if that fails the message comes again, and is known."""
    with contextlib.suppress(Exception):
        await acknowledge()
