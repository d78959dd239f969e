"""Workers of the network, as a pool sees them: they come, they beat, they fall silent."""

import asyncio
import collections
import contextlib
import uuid
from collections.abc import Coroutine
from typing import Any

from nats.aio.msg import Msg

from sandbox import codec
from sandbox.codec import ProtocolError
from sandbox.items import Resources
from sandbox.remote.broker import Address, Broker, BrokerUnreachable, log
from sandbox.remote.link import RemoteLink
from sandbox.remote.mail import Mail
from sandbox.remote.payloads import PayloadMissing
from sandbox.remote.puller import Puller
from sandbox.remote.subjects import (
    PAYLOADS,
    REPLIES,
    REQUESTS,
    PoolBeat,
    Subjects,
    WorkerBeat,
    key_of,
)
from sandbox.sessions import Reply, opened
from sandbox.workers import Members, WorkerLost

_BEAT_SECONDS = 1.0
_ACK_SECONDS = 10.0  # for a reply that is being read
_MAX_READS = 3
_GONE_KEPT = 10_000
_CLOSE_SECONDS = 5.0


class RemoteWorkers:
    """Workers that join by `scripts/launch/worker`, from anywhere; see `workers.Workers`.

    pool: its name, which the workers are started with. A worker serves one instance of it
      at a time, until that instance ends or is silent, and then the next.
    largest: the capacity of the largest worker that may join; of a larger one this is used.
    silence_seconds: without a beat, before a worker is lost. What counts is time in which
      the pool heard its own beats over the broker: an outage is nobody's silence.
    join_seconds: without broker or worker, before what waits is failed.
    credentials, tls_ca: see `broker.Address`.
    """

    def __init__(
        self,
        url: str,
        pool: str,
        *,
        largest: Resources,
        silence_seconds: float = 10.0,
        join_seconds: float = 60.0,
        credentials: str = "",
        tls_ca: str = "",
    ):
        if silence_seconds < 2 * _BEAT_SECONDS:
            raise ValueError(
                f"silence_seconds={silence_seconds} must be at least "
                f"{2 * _BEAT_SECONDS}: workers beat every {_BEAT_SECONDS:.0f} s."
            )
        self.largest = largest
        self.leaves_containers = False
        self.join_seconds = join_seconds
        self.silent_beats = int(silence_seconds / _BEAT_SECONDS)
        self.subjects = Subjects(pool)
        self.instance = ""  # of the pool, once it runs
        self.links: dict[str, RemoteLink] = {}
        self._address = Address(url=url, credentials=credentials, tls_ca=tls_ca)

    @property
    def worker_ids(self) -> list[str]:
        """Of those that are there."""
        return list(self.links)

    async def run(self, members: Members, snapshots: str) -> None:
        """Until it is cancelled. `snapshots` is not used: they are on the broker."""
        name = f"jaxpt pool {self.subjects.pool}"
        while True:
            try:
                broker = await Broker.connect(
                    self._address, name, seconds=self.join_seconds
                )
            except BrokerUnreachable as error:
                members.failed_to_join(WorkerLost("broker_unreachable", str(error)))
                await asyncio.sleep(1.0)
                continue
            serving = _Serving(self, broker, members)
            try:
                await broker.while_open(serving.run())
            except BrokerUnreachable as error:
                serving.lose_all("broker_unreachable", str(error))
            finally:
                await serving.close()


class _Serving:
    """One instance of a pool, over one connection."""

    def __init__(self, workers: RemoteWorkers, broker: Broker, members: Members):
        self._workers = workers
        self._subjects = workers.subjects
        self._broker = broker
        self._members = members
        self._instance = workers.instance = uuid.uuid4().hex
        self._mail = Mail(broker, self._subjects)
        self._links = workers.links
        self._gone: collections.OrderedDict[str, None] = collections.OrderedDict()
        self._tasks: set[asyncio.Task] = set()
        self._lonely_beats = 0
        self._is_beat_out = False
        self._closing = False

    async def run(self) -> None:
        puller = Puller(
            self._broker,
            REPLIES,
            f"pool_{self._instance}",
            self._subjects.replies(self._instance),
            lambda message: self._spawn(self._read(message)),
            ack_seconds=_ACK_SECONDS,
        )
        self._broker.on_reconnect.append(self._back)
        await self._broker.client.subscribe(self._subjects.beats("*"), cb=self._heard)
        async with asyncio.TaskGroup() as group:
            group.create_task(puller.run())
            group.create_task(self._beat())

    async def close(self) -> None:
        """Lets the workers go, and leaves nothing on the broker but snapshots."""
        self._closing = True
        self.lose_all("pool_closed")
        await self._announce(is_leaving=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await asyncio.gather(*self._tasks, return_exceptions=True)
                await self._broker.delete_consumer(REPLIES, f"pool_{self._instance}")
                await self._broker.purge(REPLIES, self._subjects.replies(self._instance))
        for task in self._tasks:
            task.cancel()
        await self._broker.close()

    def lose_all(self, reason: str, detail: str = "") -> None:
        for link in list(self._links.values()):
            link.kill(reason, detail)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _back(self) -> None:
        for link in self._links.values():
            link.missed_beats = 0  # it may not have found the broker yet
            link.post_again()
        self._spawn(self._sweep())

    async def _sweep(self) -> None:
        """A broker that was killed may have forgotten what it deleted lately."""
        prefix = self._subjects.requests("")
        with contextlib.suppress(BrokerUnreachable):
            for subject in await self._broker.subjects(REQUESTS, f"{prefix}*"):
                if subject.removeprefix(prefix) in self._gone:
                    await self._broker.purge(REQUESTS, subject)

    async def _announce(self, *, is_leaving: bool = False) -> None:
        beat = PoolBeat(instance=self._instance, is_leaving=is_leaving)
        await self._broker.announce(
            self._subjects.beats("pool"), codec.dumps(beat).encode()
        )

    async def _beat(self) -> None:
        while True:
            self._is_beat_out = True
            await self._announce()
            self._lonely_beats = 0 if self._links else self._lonely_beats + 1
            if self._lonely_beats * _BEAT_SECONDS > self._workers.join_seconds:
                self._lonely_beats = 0
                detail = (
                    f"no worker joined in {self._workers.join_seconds:.0f} s; start some "
                    f"by scripts/launch/worker --nats URL --pool {self._subjects.pool}"
                )
                self._members.failed_to_join(WorkerLost("no_workers", detail))
            await asyncio.sleep(_BEAT_SECONDS)

    async def _heard(self, message: Msg) -> None:
        try:
            if message.subject == self._subjects.beats("worker"):
                await self._heard_worker(codec.loads(WorkerBeat, message.data))
                return
            beat = codec.loads(PoolBeat, message.data)
            # After a stall several come at once, and count as one.
            if beat.instance == self._instance and self._is_beat_out:
                self._is_beat_out = False
                self._count_beat()
        except ValueError as error:
            log.warning("dropped what came under %s: %s", message.subject, error)

    def _count_beat(self) -> None:
        """The broker has passed on a beat of ours; those of live workers came as well."""
        for link in list(self._links.values()):
            link.missed_beats += 1
            if link.missed_beats > self._workers.silent_beats:
                seconds = self._workers.silent_beats * _BEAT_SECONDS
                link.kill("worker_unresponsive", f"no beat in {seconds:.0f} s")

    async def _heard_worker(self, beat: WorkerBeat) -> None:
        if beat.instance != self._instance:
            return
        link = self._links.get(beat.worker_id)
        if link is None:
            if beat.leaving:
                return
            if beat.worker_id in self._gone:
                # It was given up while it could not be heard, or did not hear of it.
                await self._broker.announce(self._subjects.given_up(beat.worker_id), b"")
                return
            link = RemoteLink(beat.worker_id, self._mail, self._subjects, self._lose)
            self._links[beat.worker_id] = link
            capacity = _bounded(beat.capacity, self._workers.largest)
            self._members.joined(beat.worker_id, link, capacity)
        link.missed_beats = 0
        if beat.leaving:
            link.kill(beat.leaving, beat.detail)

    def _lose(self, link: RemoteLink, lost: WorkerLost) -> None:
        del self._links[link.worker_id]
        self._gone[link.worker_id] = None
        while len(self._gone) > _GONE_KEPT:
            self._gone.popitem(last=False)
        # A pool that is being closed is told of nobody.
        self._spawn(self._clear(link.worker_id, None if self._closing else lost))

    async def _clear(self, worker_id: str, lost: WorkerLost | None) -> None:
        """Nothing is left for a lost worker to take, should it live after all."""
        # Those who wait for it hear of it first.
        await asyncio.sleep(0)
        if lost is not None:
            self._members.left(worker_id, lost)
        await self._broker.announce(self._subjects.given_up(worker_id), b"")
        await self._broker.purge(REQUESTS, self._subjects.requests(worker_id))
        await self._broker.delete_consumer(REQUESTS, f"worker_{worker_id}")
        await self._broker.purge(PAYLOADS, f"{self._subjects.payloads(worker_id)}.>")

    async def _read(self, message: Msg) -> None:
        """Hands a reply to whoever waits for it; one that comes twice to nobody."""
        try:
            worker_id, key = self._mail.address(message)
        except ProtocolError as error:
            log.warning("dropped a reply: %s", error)
            await _settle(message.term())
            return
        link = self._links.get(worker_id)
        if link is not None and link.waits_for(key):
            try:
                data = await self._mail.read("replies", message)
                reply_id, reply = opened(data, Reply)
                if key_of(reply_id) != key:
                    raise ProtocolError(f"The reply to {reply_id!r:.80} has another's key.")
                link.answer(key, reply)
            except ProtocolError as error:
                log.warning("worker %s answered nonsense: %s", worker_id, error)
                link.kill("worker_died", f"it answered nonsense: {error}")
            except PayloadMissing as error:
                if message.metadata.num_delivered < _MAX_READS:
                    await _settle(message.nak(delay=0.5))
                    return
                link.fail(key, WorkerLost("max_deliveries", str(error)))
        await _settle(message.ack())
        await self._mail.discard("replies", message)


async def _settle(acknowledgement: Coroutine[Any, Any, None]) -> None:
    """Sends it, or else the message comes again."""
    with contextlib.suppress(Exception):
        await acknowledgement


def _bounded(capacity: Resources, largest: Resources) -> Resources:
    return Resources(
        cpus=min(capacity.cpus, largest.cpus),
        memory_bytes=min(capacity.memory_bytes, largest.memory_bytes),
        disk_bytes=min(capacity.disk_bytes, largest.disk_bytes),
        gpus=min(capacity.gpus, largest.gpus),
    )
