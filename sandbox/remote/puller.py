"""Messages of a work queue, by a durable consumer that is pulled from without a pause."""

import asyncio
import contextlib
import json
from collections.abc import Callable

import nats.errors
from nats.aio.msg import Msg
from nats.js import api
from nats.js.errors import NotFoundError

from sandbox.remote.broker import Broker, log
from sandbox.remote.subjects import ensure_streams

_PULL_SECONDS = 30.0
_PULL_MESSAGES = 256
_DELETED_AFTER_SECONDS = 3600.0  # a consumer that nobody pulls from


class Puller:
    """Messages under one subject of a work queue, by a durable consumer of that name.

    handle: called with each; it must not raise, and sees to the ack. ack_seconds: without
    one, or a sign of progress, it is delivered again.
    """

    def __init__(
        self,
        broker: Broker,
        stream: str,
        name: str,
        subject: str,
        handle: Callable[[Msg], None],
        *,
        ack_seconds: float,
    ):
        self._broker = broker
        self._stream = stream
        self._handle = handle
        self._config = api.ConsumerConfig(
            durable_name=name,
            filter_subject=subject,
            ack_policy=api.AckPolicy.EXPLICIT,
            ack_wait=ack_seconds,
            max_ack_pending=100_000,
            inactive_threshold=_DELETED_AFTER_SECONDS,
        )
        self._inbox = broker.client.new_inbox()
        self._pulls = 0
        self._left = 0  # messages that the current pull may still bring
        self._ended = asyncio.Event()  # the current pull has
        self._troubled = True  # the consumer may not be there
        broker.on_reconnect.append(self._pull_again)

    async def run(self) -> None:
        """Until it is cancelled; the consumer stays."""
        client = self._broker.client
        subscription = await client.subscribe(f"{self._inbox}.*", cb=self._arrived)
        pull = {"batch": _PULL_MESSAGES, "expires": int(_PULL_SECONDS * 1e9)}
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._config.durable_name}"
        try:
            while True:
                if self._troubled and not await self._ensure():
                    await asyncio.sleep(0.2)
                    continue
                self._pulls += 1
                self._left = _PULL_MESSAGES
                self._ended.clear()
                with contextlib.suppress(nats.errors.Error, TimeoutError):
                    reply = f"{self._inbox}.{self._pulls}"
                    await client.publish(subject, json.dumps(pull).encode(), reply=reply)
                    async with asyncio.timeout(_PULL_SECONDS + 1.0):
                        await self._ended.wait()
        finally:
            self._broker.on_reconnect.remove(self._pull_again)
            with contextlib.suppress(nats.errors.Error):
                await subscription.unsubscribe()

    async def _ensure(self) -> bool:
        try:
            await self._broker.stream.add_consumer(self._stream, self._config)
        except NotFoundError:
            with contextlib.suppress(nats.errors.Error, TimeoutError):
                await ensure_streams(self._broker.stream)
            return False
        except (nats.errors.Error, TimeoutError) as error:
            log.warning("no consumer of %s yet: %r", self._stream, error)
            return False
        self._troubled = False
        return True

    def _pull_again(self) -> None:
        self._troubled = True
        self._ended.set()

    async def _arrived(self, message: Msg) -> None:
        status = (message.headers or {}).get(api.Header.STATUS)
        if status is None or message.reply.startswith("$JS.ACK."):
            self._left -= 1
            if self._left <= 0:
                self._ended.set()
            self._handle(message)
        elif message.subject == f"{self._inbox}.{self._pulls}" and status != "100":
            # It ended with time (408), or the consumer is not there.
            self._troubled |= status not in ("404", "408")
            self._ended.set()
