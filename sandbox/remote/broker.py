"""A connection to the broker that outlives the broker's restarts."""

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import ssl
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import nats
import nats.errors
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError

from sandbox.remote.subjects import ensure_streams

_STORE_SECONDS = 2.0  # for the broker to say that it has a message
_INSIST_SECONDS = 20.0  # for a broker that restarts to be there again

_T = TypeVar("_T")

log = logging.getLogger("sandbox.remote")


class BrokerUnreachable(RuntimeError):
    """There is no broker, it lets nobody in, or it has no JetStream."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Address:
    """Where a broker is, and how one is let in.

    url: as nats://host:4222 or tls://host:4222, several with commas between; may hold a
      user and a password. credentials, tls_ca: paths of a .creds file and of certificates.
    """

    url: str
    credentials: str = ""
    tls_ca: str = ""


class Broker:
    """A connection; `on_reconnect` is called whenever it is back after an outage."""

    def __init__(self, client: Client):
        self.client = client
        self.stream: JetStreamContext = client.jetstream(timeout=5.0)
        self.on_reconnect: list[Callable[[], None]] = []
        self.closed = asyncio.Event()  # for good: it lets us in no longer, say
        self._reconnecting: asyncio.Task | None = None

    @classmethod
    async def connect(cls, address: Address, name: str, *, seconds: float) -> "Broker":
        """Raises BrokerUnreachable when it was not to be had for so many seconds."""
        client = Client()
        broker = cls(client)

        said: list[str] = [""]

        async def failed(error: Exception) -> None:
            said[0] = f"{error!r}"
            log.info("broker: %r", error)

        async def closed() -> None:
            broker.closed.set()

        async def reconnected() -> None:
            # Apart from the client's own task, which must go on for anything to arrive.
            broker._reconnecting = asyncio.create_task(broker._reconnected())

        options: dict[str, Any] = {}
        if address.credentials:
            options["user_credentials"] = address.credentials
        if address.tls_ca:
            options["tls"] = ssl.create_default_context(cafile=address.tls_ca)
        try:
            async with asyncio.timeout(seconds):
                await client.connect(
                    address.url.split(","),
                    name=name,
                    error_cb=failed,
                    reconnected_cb=reconnected,
                    closed_cb=closed,
                    connect_timeout=5,
                    reconnect_time_wait=0.5,  # type: ignore[arg-type]
                    max_reconnect_attempts=-1,
                    ping_interval=5,
                    **options,
                )
                await ensure_streams(broker.stream)
        except (nats.errors.Error, OSError, TimeoutError) as error:
            await broker.close()
            raise BrokerUnreachable(
                f"No broker with JetStream to be had in {seconds:.0f} s "
                f"({said[0] or repr(error)}); start one by scripts/launch/nats, or see "
                "to the address and the credentials."
            ) from error
        except BaseException:
            await broker.close()
            raise
        return broker

    async def _reconnected(self) -> None:
        with contextlib.suppress(nats.errors.Error, TimeoutError):
            await ensure_streams(self.stream)
        for call in self.on_reconnect:
            call()

    async def close(self) -> None:
        if self._reconnecting is not None:
            self._reconnecting.cancel()
        if not self.client.is_connected:
            # Closed in an outage the client would leave their tasks behind.
            for subscription in list(self.client._subs.values()):
                with contextlib.suppress(nats.errors.Error):
                    await subscription.unsubscribe()
        try:
            async with asyncio.timeout(2.0):
                await self.client.close()
        except Exception as error:
            # On a connection that is dead it fails in ways of its own.
            log.info("closing the connection: %r", error)

    async def while_open(self, work: Coroutine[Any, Any, None]) -> None:
        """Does the work, which is cancelled if the connection is closed for good.

        Raises what the work raises; BrokerUnreachable if it was cancelled.
        """
        working = asyncio.create_task(work)
        closed = asyncio.create_task(self.closed.wait())
        try:
            await asyncio.wait((working, closed), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise BrokerUnreachable("The broker closed the connection for good.")
            await working
        finally:
            working.cancel()
            closed.cancel()
            await asyncio.gather(working, closed, return_exceptions=True)

    async def announce(self, subject: str, data: bytes) -> None:
        """To whoever listens now; lost in an outage, for it would be stale after it."""
        if not self.client.is_connected:
            return
        with contextlib.suppress(nats.errors.Error):
            await self.client.publish(subject, data)

    async def store(
        self, subject: str, data: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        """Returns once a stream has the message, however long the broker is away.

        With a `Nats-Msg-Id` it is in the stream once, as long as it is there.

        Raises:
          ConnectionClosedError: this connection was closed.
          MaxPayloadError: it is larger than the broker takes.
        """
        pause = 0.05
        for attempt in itertools.count(1):
            try:
                await self.stream.publish(
                    subject,
                    data,
                    timeout=_STORE_SECONDS,
                    headers=dict(headers) if headers else None,
                )
                return
            except (nats.errors.ConnectionClosedError, nats.errors.MaxPayloadError):
                raise
            except (nats.errors.Error, TimeoutError) as error:
                if attempt % 10 == 0:
                    log.warning("not stored yet under %s: %r", subject, error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, 1.0)

    async def last(self, stream: str, subject: str) -> bytes | None:
        """The last message under a subject; None if there is none.

        Raises:
          BrokerUnreachable: it was away for too long.
        """
        message = await self._insist(
            lambda: self.stream.get_last_msg(stream, subject, direct=True)
        )
        return None if message is None else message.data or b""

    async def purge(self, stream: str, subject: str) -> None:
        """Deletes what is under a subject; what can't be now goes by its age."""
        with contextlib.suppress(BrokerUnreachable):
            await self._insist(lambda: self.stream.purge_stream(stream, subject=subject))

    async def subjects(self, stream: str, pattern: str) -> list[str]:
        """Those under which it has messages. Raises BrokerUnreachable."""
        info = await self._insist(
            lambda: self.stream.stream_info(stream, subjects_filter=pattern)
        )
        return list(info.state.subjects or {}) if info else []

    async def delete_consumer(self, stream: str, name: str) -> None:
        with contextlib.suppress(BrokerUnreachable):
            await self._insist(lambda: self.stream.delete_consumer(stream, name))

    async def _insist(self, call: Callable[[], Awaitable[_T]]) -> _T | None:
        """What it returns, None for what is not found. Raises BrokerUnreachable."""
        bound = asyncio.get_running_loop().time() + _INSIST_SECONDS
        while True:
            try:
                return await call()
            except NotFoundError:
                return None
            except (nats.errors.Error, TimeoutError) as error:
                is_late = asyncio.get_running_loop().time() > bound
                if is_late or self.client.is_closed:
                    raise BrokerUnreachable(f"The broker was away: {error!r}") from error
            await asyncio.sleep(0.2)
