"""A pool's way to one worker of the network: requests that it has not answered."""

import asyncio
import dataclasses
from collections.abc import Callable

import nats.errors

from sandbox.codec import ProtocolError
from sandbox.remote.mail import Letter, Mail
from sandbox.remote.subjects import Subjects, key_of
from sandbox.sessions import Failed, Reply, Request, envelope
from sandbox.workers import WorkerLost


@dataclasses.dataclass
class _Waiting:
    reply: asyncio.Future[Reply]
    letter: Letter | None = None  # once it is written
    posting: asyncio.Task | None = None


class RemoteLink:
    """See `workers.Link`. on_kill: called when the pool gives the worker up."""

    def __init__(
        self,
        worker_id: str,
        mail: Mail,
        subjects: Subjects,
        on_kill: Callable[["RemoteLink", WorkerLost], None],
    ):
        self.worker_id = worker_id
        self.missed_beats = 0
        self._mail = mail
        self._subject = subjects.requests(worker_id)
        self._on_kill = on_kill
        self._waiting: dict[str, _Waiting] = {}
        self._lost: tuple[str, str] | None = None  # reason and detail

    async def request(self, request_id: str, request: Request) -> Reply:
        """Raises WorkerLost if no reply will come."""
        if self._lost is not None:
            raise WorkerLost(*self._lost)
        key = key_of(request_id)
        if key in self._waiting:
            return await asyncio.shield(self._waiting[key].reply)
        waiting = _Waiting(asyncio.get_running_loop().create_future())
        self._waiting[key] = waiting
        data = envelope(request, request_id)
        waiting.posting = asyncio.create_task(self._post(key, waiting, data))
        try:
            return await waiting.reply
        finally:
            waiting.posting.cancel()
            self._waiting.pop(key, None)

    async def _post(self, key: str, waiting: _Waiting, data: bytes) -> None:
        try:
            if waiting.letter is None:
                waiting.letter = await self._mail.write(
                    "requests", self._subject, self.worker_id, key, data
                )
            await self._mail.post(waiting.letter)
        except* (ProtocolError, nats.errors.MaxPayloadError) as errors:
            detail = str(errors.exceptions[0])
            self.answer(key, Failed(reason="bad_request", detail=detail))
        except* nats.errors.ConnectionClosedError:
            self.kill("worker_died", "the connection to the broker was closed")

    def post_again(self) -> None:
        """After an outage: what the broker still has is not there twice."""
        for key, waiting in self._waiting.items():
            if waiting.posting is not None and waiting.posting.done():
                waiting.posting = asyncio.create_task(self._post(key, waiting, b""))

    def waits_for(self, key: str) -> bool:
        return key in self._waiting

    def answer(self, key: str, reply: Reply) -> None:
        waiting = self._waiting.get(key)
        if waiting is not None and not waiting.reply.done():
            waiting.reply.set_result(reply)

    def fail(self, key: str, lost: WorkerLost) -> None:
        """This one request will get no reply."""
        waiting = self._waiting.get(key)
        if waiting is not None and not waiting.reply.done():
            waiting.reply.set_exception(lost)
            waiting.reply.exception()  # whoever waits hears of it; nobody else has to

    def kill(self, reason: str = "worker_died", detail: str = "") -> None:
        """Gives the worker up, which ends its sandboxes once it hears of it."""
        if self._lost is not None:
            return
        self._lost = (reason, detail)
        for key in list(self._waiting):
            self.fail(key, WorkerLost(reason, detail))
        self._on_kill(self, WorkerLost(reason, detail))
